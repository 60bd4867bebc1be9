"""Measures a simulated server: its buffer levels, warnings and delivery attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.access.principal import Principal
from holdfast.fanout.feed import EntryReceiver
from holdfast.gateway.connection import Connection
from holdfast.ingest.intake import Intake
from holdfast.message import LogEntry
from holdfast.session.effects import Effects, Emit, SessionEvent
from holdfast.session.session import Session
from holdfast.verify.history import Level, Recorder, Tried, WarningSeen
from holdfast.wire.codec import EncodedRun


@dataclass(slots=True)
class Watch:
    """Records measurements; a level only at a new high. ``names`` are the history's."""

    record: Recorder
    now: Callable[[], float]
    bounds: dict[str, int]
    names: dict[str, str] = field(default_factory=dict)
    _highs: dict[tuple[str, str], int] = field(default_factory=dict)
    _tries: dict[tuple[str, int, int, int], int] = field(default_factory=dict)

    def record_levels(self, connection: Connection) -> None:
        """Record what waits for a client: in its lanes, and written but not taken."""
        levels = {
            "messages": connection.session.waiting_messages,
            "bytes": connection.waiting_bytes,
            "requests": connection.session.open_requests,
        }
        name = connection.connection_id
        for what, value in levels.items():
            if value > self._highs.get((name, what), 0):
                self._highs[name, what] = value
                where = f"{what} of {self.names.get(name, name)}"
                self.record.note(
                    Level(at=self.now(), where=where, value=value, bound=self.bounds[what])
                )

    def record_sends(self, sends: int) -> None:
        """Record how many sends wait in ingest."""
        if sends > self._highs.get(("ingest", "sends"), 0):
            self._highs["ingest", "sends"] = sends
            self.record.note(
                Level(
                    at=self.now(),
                    where="sends waiting in ingest",
                    value=sends,
                    bound=self.bounds["sends"],
                )
            )

    def record_warning(self, connection_id: str, grace_seconds: float) -> None:
        connection = self.names.get(connection_id, connection_id)
        self.record.note(
            WarningSeen(at=self.now(), connection=connection, grace_seconds=grace_seconds)
        )

    def record_attempt(self, gateway: str, last: LogEntry) -> None:
        """Record an attempt to deliver the batch that ends with an entry. A failover
        gives offsets again, in another epoch.
        """
        batch = (gateway, last.shard, last.offset, last.epoch)
        self._tries[batch] = attempt = self._tries.get(batch, 0) + 1
        self.record.note(
            Tried(at=self.now(), gateway=gateway, envelope=last.offset, attempt=attempt)
        )


class WatchedReceiver:
    """A gateway whose deliveries are counted."""

    def __init__(self, gateway: EntryReceiver, name: str, watch: Watch) -> None:
        self._gateway, self._name, self._watch = gateway, name, watch
        self.lost_log = False
        """Whether the log was lost for it after its start, which begins at the end."""
        self._has_started = False

    def deliver(self, entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
        self._watch.record_attempt(self._name, entries[-1])
        return self._gateway.deliver(entries)

    async def on_log_lost(self) -> None:
        self.lost_log = self._has_started
        self._has_started = True
        await self._gateway.on_log_lost()


def watched_intake(watch: Watch, base: type[Intake]) -> type[Intake]:
    """``base``, with its queue measured whenever it may have grown."""

    class WatchedIntake(base):  # type: ignore[misc, valid-type]
        def submit(self, *args: Any, **kwargs: Any) -> None:
            super().submit(*args, **kwargs)
            watch.record_sends(self.waiting)

    return WatchedIntake


def watched(
    watch: Watch, connection: type[Connection] = Connection, session: type[Session] = Session
) -> type[Connection]:
    """A connection and its session, measured.

    A warning is recorded when it is decided: a socket that takes nothing may send it
    only together with the closing.
    """

    class WatchedSession(session):  # type: ignore[misc, valid-type]
        __slots__ = ("connection",)

        def deliver(self, run: EncodedRun, now: float) -> Effects:
            effects: Effects = super().deliver(run, now)
            watch.record_levels(self.connection)
            return effects

    class WatchedConnection(connection):  # type: ignore[misc, valid-type]
        __slots__ = ()

        def __init__(self, *given: Any) -> None:
            super().__init__(*given, session_type=WatchedSession)

        def open(self, principal: Principal) -> None:
            super().open(principal)
            self.session.connection = self

        def flush(self) -> None:
            super().flush()
            watch.record_levels(self)

        def do(self, steps: Sequence[object]) -> None:
            for step in steps:
                if isinstance(step, Emit) and step.event is SessionEvent.SLOW_CONSUMER_WARNED:
                    grace = self._deps.settings.backpressure.outbound.grace_period_seconds
                    watch.record_warning(self.connection_id, grace)
            super().do(steps)
            watch.record_levels(self)

    return WatchedConnection
