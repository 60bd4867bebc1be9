"""Forgets old idempotency keys, in steps so small that sends never wait long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from holdfast.bounds import positive
from holdfast.clock import Clock, timestamp
from holdfast.store.contract import ChatStore, Records

DAY_SECONDS = 86_400.0
SWEEP_SECONDS = 600.0
"""How often to look for keys that are old enough."""
FORGOTTEN_AT_ONCE = 500
PAUSE_SECONDS = 0.05
"""Between two commits of one sweep: waiting sends go first."""


@dataclass(frozen=True, slots=True)
class KeySettings:
    """How long idempotency keys are kept. A later repeat is carried out again."""

    idempotency_ttl_days: float = 0
    """How long the key of a message (``client_message_id``) is remembered. 0: as long
    as the message. Otherwise a retry after this time stores the message twice. The
    design document says 7.
    """
    answers_ttl_days: float = 7
    """How long the answer to a REST change with an ``Idempotency-Key`` (other than a
    send) is remembered, at least. After that the same key is a new request.
    """

    def __post_init__(self) -> None:
        if self.idempotency_ttl_days < 0:
            raise ValueError(
                f"idempotency_ttl_days must be 0 or more, not {self.idempotency_ttl_days}"
            )
        positive(self, "answers_ttl_days")


class KeyExpiry:
    """Runs until cancelled. Raises what the store raises; a restart continues."""

    def __init__(
        self,
        chats: ChatStore,
        records: Records,
        clock: Clock,
        settings: KeySettings | None = None,
    ) -> None:
        self._chats = chats
        self._records = records
        self._clock = clock
        self._settings = settings or KeySettings()

    async def run(self) -> None:
        while True:
            await self.sweep()
            await asyncio.sleep(SWEEP_SECONDS)

    async def sweep(self) -> None:
        """Forget everything that is old enough now."""
        now, settings = self._clock.now(), self._settings
        answers_before = _days_before(now, settings.answers_ttl_days)
        await self._repeat(partial(self._records.forget_answers, answers_before))
        if settings.idempotency_ttl_days:
            sends_before = _days_before(now, settings.idempotency_ttl_days)
            await self._repeat(partial(self._chats.forget_send_keys, sends_before))

    async def _repeat(self, forget: Callable[[int], Awaitable[int]]) -> None:
        while True:
            if not await forget(FORGOTTEN_AT_ONCE):
                return
            await asyncio.sleep(PAUSE_SECONDS)


def _days_before(now: float, days: float) -> str:
    return timestamp(max(now - days * DAY_SECONDS, 0.0))
