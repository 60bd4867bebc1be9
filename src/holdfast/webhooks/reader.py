"""From the event log to jobs: one per (endpoint, chat, sequence).

The position is stored in the same transaction as the jobs, so a crash repeats nothing and leaves nothing out. Where a
batch makes no jobs it is stored only now and then: a server without webhooks must not pay a commit for every batch.
An endpoint gets what is committed after it was added; a first start begins at the log's end.

A stored position past the log's end tells that the chats were restored and the jobs, elsewhere, were not. What the
restored log holds was made into jobs before, so the reader begins at its end. Stores of jobs never take a position
back: it goes on under the next name, and the last name in use is the one that counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.clock import Clock, timestamp
from holdfast.errors import UnreadableEvent
from holdfast.eventlog.contract import EventLog
from holdfast.message import LogEntry
from holdfast.telemetry import log
from holdfast.webhooks.contract import WebhookEndpoint, WebhookEndpoints
from holdfast.webhooks.delivery import DeliveryNotice, draft_of
from holdfast.work.contract import ReaderMark, WorkStore
from holdfast.work.job import JobDraft

NAME = "webhooks"
BATCH = 500
UNMARKED_MAX = 10_000
"""How many entries that made no jobs may be read again after a crash."""


class WebhookReader:
    """Runs until cancelled; where it fails it is started again by its node, at its stored position."""

    def __init__(self, log: EventLog, endpoints: WebhookEndpoints, jobs: WorkStore, clock: Clock) -> None:
        self._log, self._endpoints, self._jobs, self._clock = log, endpoints, jobs, clock
        self._known: tuple[int, dict[str, list[WebhookEndpoint]]] = (0, {})
        self._name, self._marked = NAME, 0
        self.begun = False
        """Whether its position is stored. Who adds an endpoint before that would not get all that came after."""
        self._noticed: dict[str, int] = {}
        """Where the log ended when an endpoint was first seen: what is behind that came after it was added."""

    async def run(self) -> None:
        position = await self.begin()
        while True:
            await self._log.wait(position)
            position = await self.advance(position)

    async def begin(self) -> int:
        """Where it stands: at its stored position, or at the log's end where that is none of this log."""
        self._marked = await self._begin()
        self.begun = True
        return self._marked

    async def _begin(self) -> int:
        restores, position = 0, await self._jobs.position(NAME)
        while (later := await self._jobs.position(f"{NAME}.{restores + 1}")) is not None:
            restores, position = restores + 1, later
        end = await self._log.end()
        if position is not None and position > end:
            log.warning(
                "the log of chats ends before the webhooks' position: it was restored", end=end, position=position
            )
            restores, position = restores + 1, None
        self._name = f"{NAME}.{restores}" if restores else NAME
        if position is None:
            position = end
            await self._mark(position)
        return position

    async def advance(self, position: int) -> int:
        """Make jobs of the entries after ``position``; returns where it stands then."""
        try:
            entries = await self._log.read(position, BATCH)
        except UnreadableEvent as event:
            # The fanout reports it; a message that cannot be read cannot be sent.
            await self._mark(event.position)
            return event.position
        if not entries:
            return position
        by_tenant = await self._by_tenant(position)
        at = timestamp(self._clock.now())
        told = [entry for entry in entries if entry.tenant in by_tenant]
        drafts = [draft for entry in told for draft in self._drafts(entry, by_tenant[entry.tenant], at)]
        reached = entries[-1].position
        if drafts or reached - self._marked >= UNMARKED_MAX:
            await self._mark(reached, drafts)
        return reached

    async def _mark(self, position: int, drafts: Sequence[JobDraft] = ()) -> None:
        await self._jobs.enqueue(drafts, ReaderMark(self._name, position))
        self._marked = position

    async def _by_tenant(self, position: int) -> dict[str, list[WebhookEndpoint]]:
        """Who is told; before a change of endpoints takes effect, the position it takes effect from is stored."""
        version, known = self._known
        if version != self._endpoints.version:
            if position > self._marked:
                await self._mark(position)
            version, known = self._endpoints.version, {}
            endpoints, end = await self._endpoints.all(), await self._log.end()
            self._noticed = {each.endpoint_id: self._noticed.get(each.endpoint_id, end) for each in endpoints}
            for endpoint in endpoints:
                known.setdefault(endpoint.tenant, []).append(endpoint)  # for a disabled one too: its jobs are parked
            self._known = (version, known)
        return known

    def _drafts(self, entry: LogEntry, endpoints: Sequence[WebhookEndpoint], at: str) -> list[JobDraft]:
        """What an endpoint is told: nothing from before it was added, however far behind this reader is.

        The times of day decide only where the positions cannot, so a clock that is set back costs no message.
        """
        about = (entry.message.chat_id, entry.message.sequence, entry.message.message_id)
        return [
            draft_of(DeliveryNotice(each.endpoint_id, entry.tenant, at, *about))
            for each in endpoints
            if entry.position > self._noticed[each.endpoint_id] or each.created_at <= entry.message.created_at
        ]
