"""One follower of the log for all: it rings the Redis doorbell for each change and beats once a second.

An advisory lock says who it is; the lock ends with its connection, and another admin node takes over within a retry. A
follower speaks at least once a second, so the server (from PostgreSQL 14 on) ends the connection of one that is silent.
Nothing is marked as sent: a new follower rings again for the last hundred changes, and ringing twice changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

from holdfast import telemetry
from holdfast.errors import HoldfastError
from holdfast.limits.rulestore.contract import CHANGES_PER_READ, Head
from holdfast.limits.rulestore.postgres.connection import (
    FOREIGN,
    PUBLISHER_LOCK,
    SQL,
    PostgresSettings,
    connected,
    milliseconds,
)
from holdfast.limits.rulestore.postgres.store import payload
from holdfast.limits.rulestore.reading import ring_of

TICK_SECONDS = 0.1
TAKEOVER_SECONDS = 0.5
BEAT_SECONDS = 1.0
SILENCE_SECONDS_MIN = 2 * BEAT_SECONDS
IDLE_SESSION_TIMEOUT_SINCE = (14,)
RING_SECONDS = 1.0
"""How long one tick may ring: a Redis that swallows everything must not keep the beat waiting."""


class LogFollower:
    """Runs on every admin node; one of them works, the others wait for its lock. ``async with`` starts and stops it.

    ``on_lead`` is done first by whoever gets the lock: what the database needs once, such as its tables.
    """

    def __init__(
        self,
        settings: PostgresSettings,
        publish: Callable[[str], Awaitable[None]] | None,
        on_lead: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._settings = settings
        self._publish = publish
        self._on_lead = on_lead
        self._task: asyncio.Task[None] | None = None
        self.working = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._live()
            except (*FOREIGN, HoldfastError) as error:
                telemetry.log.warning("limits.follower_lost_database", error=type(error).__name__)
            except Exception as error:  # whatever it is, somebody must ring and beat
                telemetry.defect("limits", error)
            await asyncio.sleep(TAKEOVER_SECONDS)

    async def _live(self) -> None:
        """One connection's life: wait for the lock, then follow until something breaks."""
        db = await connected(self._settings)
        try:
            await self._wait_for_lock(db)
            if self._on_lead is not None:
                await self._on_lead()  # on connections of its own: this one may be silent until it is done
            if db.get_server_version() >= IDLE_SESSION_TIMEOUT_SINCE:
                silence = max(self._settings.timeout_seconds, SILENCE_SECONDS_MIN)
                await db.execute(SQL["end_if_silent"], milliseconds(silence))
            self.working = True
            await self._follow(db)
        finally:
            self.working = False
            db.terminate()

    async def _wait_for_lock(self, db: Any) -> None:
        while True:
            if await db.fetchval(SQL["become_publisher"], PUBLISHER_LOCK):
                return
            await asyncio.sleep(TAKEOVER_SECONDS)

    async def _follow(self, db: Any) -> None:
        head = Head(*await db.fetchrow(SQL["head"]))
        cursor = max(0, head.seq - CHANGES_PER_READ)
        now = asyncio.get_running_loop().time
        next_beat = now()
        while True:
            if now() >= next_beat:
                next_beat = now() + BEAT_SECONDS
                await db.execute(SQL["beat"])
            cursor = await self._ring(db, head.store, cursor)
            await asyncio.sleep(TICK_SECONDS)

    async def _ring(self, db: Any, store: str, cursor: int) -> int:
        """Ring for what is after the cursor; returns how far it came. A doorbell that is away is tried next tick."""
        if self._publish is None:
            return cursor
        rows = await db.fetch(SQL["changes_after"], cursor, CHANGES_PER_READ)
        try:
            async with asyncio.timeout(RING_SECONDS):
                for row in rows:
                    ring = ring_of(row[0], store)
                    await self._publish(payload(ring))
                    cursor = ring.seq
        except (HoldfastError, TimeoutError):
            pass
        return cursor
