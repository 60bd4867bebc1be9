"""Looks for damaged counters, so that one of an idle chat is an alert before somebody
sends there.

A chat that is halted for its counter is evidence, too: a process that was killed as it
halted one has told nobody, so the first look of the next one counts it again.

A send checks its own chat's counter. This check reads the counters of all chats, a
section at a time, round and round: all of 5,000 chats every 5 s, and 60,000 within a
minute. One node of a cluster does it, by lease.
"""

from __future__ import annotations

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.message import PageToken
from holdfast.store import numbering
from holdfast.store.contract import ChatStore
from holdfast.store.leases.contract import Leases
from holdfast.store.leases.held import HeldLease

LOOK_SECONDS = 5.0
SECTIONS_AT_ONCE = 5
"""Sections that are read in a row; then the readers of the store are left alone."""
HALTED_COUNTED_MAX = 100
"""Chats halted before that are counted again; each is a line in the log."""
LEASE = "counter check"


class CounterCheck:
    """``run`` must be running on every node that takes sends."""

    def __init__(
        self, chats: ChatStore, leases: Leases, clock: Clock, pause_seconds: float = LOOK_SECONDS
    ) -> None:
        self._chats, self._pause_seconds = chats, pause_seconds
        self._lease = HeldLease(leases, LEASE, clock)
        self._after: PageToken | None = None
        self._has_looked = False

    async def run(self) -> None:
        await self._lease.repeat(self._pause_seconds, self.look, _on_failure)

    async def look(self) -> None:
        """Look at the next sections, and halt what is damaged there. Raises what the
        store raises; the next look begins where this one failed.
        """
        if not self._has_looked:
            await self._count_halted()
            self._has_looked = True
        for _ in range(SECTIONS_AT_ONCE):
            page = await self._chats.damaged(self._after)
            if page.chats:
                await self._chats.halt_damaged(page.chats)
            self._after = page.next
            if page.next is None:
                break

    async def _count_halted(self) -> None:
        for chat in (await self._chats.halted(HALTED_COUNTED_MAX)).chats:
            match chat.why:
                case numbering.NO_COUNTER:
                    telemetry.counter_corruption(chat.chat_id)
                case numbering.TAKEN:
                    telemetry.duplicate_sequence(chat.chat_id)


def _on_failure(error: Exception) -> None:
    """Others report that the store does not answer."""
    telemetry.log.info("ingest.counters_unchecked", error=str(error) or "no answer in time")
