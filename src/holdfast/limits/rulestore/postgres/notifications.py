"""Notifications from PostgreSQL: the follower that passes them on, and a plain
listener.

``LogFollower`` does for all nodes what only one must do, by advisory locks on the
primary:

- One node per region follows the log and publishes every change to the region's Redis.
  Only nodes with a Redis ask for this lock, whose key is the region's name.
- One node in total updates the heartbeat row each second, which shows a replica's lag.

The follower forwards each NOTIFY as it arrives. It does not read the log first, because
a region may be a hundred milliseconds from the primary. A tick reads the changes that
no notification brought. A lock ends with its connection, and another node takes over
within ``TAKEOVER_SECONDS``. A holder sends something at least twice a second, and the
server (from PostgreSQL 14 on) closes the connection of one that is silent. Nothing is
marked as sent: a new follower publishes the last hundred changes again, which does no
harm.

``PostgresNotifications`` is LISTEN on the primary (a standby refuses to listen), for
nodes that read the primary. A network that drops everything is noticed, because a quiet
connection is queried every few seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

from holdfast import telemetry
from holdfast.drivers.postgres import driver_text
from holdfast.drivers.postgres_database import (
    FOREIGN,
    PostgresSettings,
    connected,
    milliseconds,
)
from holdfast.errors import HoldfastError
from holdfast.limits.rulestore.contract import (
    CHANGES_PER_READ,
    CHANNEL,
    TICK_SECONDS,
    ChangeNotification,
    RuleLogHead,
)
from holdfast.limits.rulestore.notifications import LocalNotifications, end_tasks
from holdfast.limits.rulestore.postgres.connection import HEARTBEAT_LOCK, RULES, SQL
from holdfast.limits.rulestore.postgres.store import payload
from holdfast.limits.rulestore.serialization import decode_notification, notification_of

TAKEOVER_SECONDS = 0.5
BEAT_SECONDS = 1.0
SILENCE_SECONDS_MIN = 2 * BEAT_SECONDS
IDLE_SESSION_TIMEOUT_SINCE = (14,)
PUBLISH_SECONDS = 1.0
"""How long one tick may publish: a slow Redis must not delay the heartbeat."""

Publish = Callable[[str], Awaitable[None]]


def region_lock(region: str) -> int:
    """The advisory lock of a region's follower."""
    digest = hashlib.blake2b(f"holdfast.limits.follower:{region}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


class LogFollower:
    """Runs on every node with rules in PostgreSQL, on a connection of its own.

    ``async with`` starts and stops it. Without ``publish`` (no Redis) it never asks for
    the region's lock. A follower reads the log every ``tick_seconds``. The node that
    gets the heartbeat's lock runs ``on_lead``: what the database needs once, such as
    its tables.
    """

    def __init__(
        self,
        settings: PostgresSettings,
        publish: Publish | None,
        on_lead: Callable[[], Awaitable[None]] | None = None,
        *,
        region: str = "local",
        tick_seconds: float = TICK_SECONDS,
    ) -> None:
        self._settings = settings
        self._publish = publish
        self._on_lead = on_lead
        self._region_lock = region_lock(region)
        self._tick_seconds = tick_seconds
        self._task: asyncio.Task[None] | None = None
        self._forwarding: asyncio.Task[None] | None = None
        self._store, self._cursor = "", 0
        self.follows = False
        """It is the follower of its region."""
        self.beats = False
        """It updates the heartbeat row."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(task for task in (self._task, self._forwarding) if task is not None)

    async def _run(self) -> None:
        while True:
            try:
                await self._live()
            except (*FOREIGN, HoldfastError) as error:
                telemetry.log.warning("limits.follower_disconnected", error=driver_text(error))
            except Exception as error:  # whatever it is, a node must publish and beat
                telemetry.defect("limits", error)
            await asyncio.sleep(TAKEOVER_SECONDS)

    async def _live(self) -> None:
        """One connection: ask for the missing locks, do the work of those it holds."""
        db = await connected(self._settings)
        now = asyncio.get_running_loop().time
        next_try = next_beat = now()
        try:
            while True:
                if now() >= next_try:
                    await self._ask_for_locks(db)
                    next_try = now() + TAKEOVER_SECONDS
                if self.beats and now() >= next_beat:
                    next_beat = now() + BEAT_SECONDS
                    await db.execute(SQL["beat"])
                if self.follows:
                    await self._publish_from_log(db)
                await asyncio.sleep(self._tick_seconds if self.follows else TAKEOVER_SECONDS)
        finally:
            self.follows = self.beats = False
            if self._forwarding is not None:
                self._forwarding.cancel()
            db.terminate()

    async def _ask_for_locks(self, db: Any) -> None:
        held = (self.beats, self.follows)
        if not self.beats and await db.fetchval(SQL["try_lock"], HEARTBEAT_LOCK):
            if self._on_lead is not None:
                await self._on_lead()  # on its own connections: this one may be silent meanwhile
            self.beats = True
        if (
            self._publish is not None
            and not self.follows
            and await db.fetchval(SQL["try_lock"], self._region_lock)
        ):
            await self._begin_to_follow(db, self._publish)
            self.follows = True
        if (
            held != (self.beats, self.follows)
            and db.get_server_version() >= IDLE_SESSION_TIMEOUT_SINCE
        ):
            silence = max(self._settings.timeout_seconds, SILENCE_SECONDS_MIN)
            await db.execute(SQL["end_if_silent"], milliseconds(silence))

    async def _begin_to_follow(self, db: Any, publish: Publish) -> None:
        local = LocalNotifications()
        self._forwarding = asyncio.create_task(self._forward(local, publish))

        def on_notification(_connection: object, _pid: int, _channel: str, text: str) -> None:
            local.notify(decode_notification(text))

        await db.add_listener(CHANNEL, on_notification)
        head = RuleLogHead(*await db.fetchrow(SQL["head"]))
        self._store, self._cursor = head.store, max(0, head.seq - CHANGES_PER_READ)

    async def _forward(self, local: LocalNotifications, publish: Publish) -> None:
        """Forward the primary's notifications. The next tick retries what fails."""
        async for notification in local.notifications():
            try:
                if notification.seq:
                    async with asyncio.timeout(PUBLISH_SECONDS):
                        await publish(payload(notification))
                expected = (self._store, self._cursor + 1)
                if notification.rule and (notification.store, notification.seq) == expected:
                    self._cursor = notification.seq
            except (HoldfastError, TimeoutError):
                continue
            except Exception as error:
                telemetry.defect("limits", error)

    async def _publish_from_log(self, db: Any) -> None:
        """Publish what is after the cursor. The next tick retries what fails."""
        assert self._publish is not None
        rows = await db.fetch(SQL["changes_after"], self._cursor, CHANGES_PER_READ)
        try:
            async with asyncio.timeout(PUBLISH_SECONDS):
                for row in rows:
                    notification = notification_of(row[0], self._store)
                    await self._publish(payload(notification))
                    self._cursor = max(self._cursor, notification.seq)
        except (HoldfastError, TimeoutError):
            pass


class PostgresNotifications:
    """``contract.ChangeNotifications`` on its own connection, during iteration."""

    def __init__(self, settings: PostgresSettings, quiet_seconds: float = 5.0) -> None:
        self._settings = settings
        self._quiet_seconds = quiet_seconds

    async def notifications(self) -> AsyncIterator[ChangeNotification]:
        local = LocalNotifications()
        try:
            connection = await connected(self._settings)
        except FOREIGN as error:
            raise RULES.unavailable(error, "be listened to") from error

        def on_notification(_connection: object, _pid: int, _channel: str, payload: str) -> None:
            local.notify(decode_notification(payload))

        watch = asyncio.create_task(self._watch(connection, local))
        try:
            connection.add_termination_listener(lambda _: local.close())
            notifications = local.notifications()
            first = await anext(notifications)
            await connection.add_listener(CHANNEL, on_notification)
            yield first
            async for notification in notifications:
                yield notification
        except FOREIGN as error:
            raise RULES.unavailable(error, "be listened to") from error
        finally:
            watch.cancel()
            connection.terminate()

    async def _watch(self, connection: Any, local: LocalNotifications) -> None:
        try:
            while True:
                await asyncio.sleep(self._quiet_seconds)
                await connection.fetchval("SELECT 1", timeout=self._quiet_seconds)
        except FOREIGN:
            local.close()
