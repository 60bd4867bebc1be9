"""Reads the event log and hands every batch to this node's gateway: best effort.

Every gateway reads the whole log and delivers by its own roster. So a delivery asks
nobody: no members, no registry, no link. What is missed (a lost log, a defect) is never
queued for later: the session sees the gap or learns the head from its heartbeat, and
its client syncs. A failure here affects neither sends nor connections.

If the log is lost at this reader's position, or all epochs were raised, the feed goes
on at the log's end, and the gateway reads from the store what it must know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast import telemetry
from holdfast.clock import Clock, timestamp
from holdfast.errors import HoldfastError, OutcomeUnknown, Unavailable, UnreadableEvent
from holdfast.eventlog.contract import START, EventLog, LogLost, Position
from holdfast.fanout.dead_letters import DATA_BYTES_MAX, DeadLetter, DeadLetters
from holdfast.fanout.hot_chats import HotChats
from holdfast.fanout.members import Members
from holdfast.fanout.routing import Gaps
from holdfast.fanout.settings import RetrySettings
from holdfast.message import AllEpochsRaised, LogEntry, Message

T = TypeVar("T")


class EntryReceiver(Protocol):
    """The gateway, as the feed uses it."""

    def deliver(self, entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
        """Deliver a batch. Returns the events that do not say what they change."""
        ...

    async def on_log_lost(self) -> None:
        """Entries are lost: put all sessions behind and read their memberships. Every
        entry that is delivered from now on was committed after this began.
        """
        ...


@dataclass(frozen=True, slots=True)
class FeedDeps:
    """``members`` is kept true by the entries that the feed reads."""

    log: EventLog
    receiver: EntryReceiver
    members: Members
    dead_letters: DeadLetters


class LogFeed:
    """One reader of the log, up to ``read_entries_max`` per batch. ``watch`` is called
    with each batch before it is delivered.
    """

    def __init__(
        self,
        deps: FeedDeps,
        clock: Clock,
        retry: RetrySettings | None = None,
        read_entries_max: int = 500,
        watch: Callable[[Sequence[LogEntry]], None] = lambda entries: None,
        hot_messages_per_minute: int = 100,
    ) -> None:
        self._deps = deps
        self._clock = clock
        self._backoff = (retry or RetrySettings()).backoff
        self._read_entries_max = read_entries_max
        self._watch = watch
        self._gaps = Gaps()
        self._hot = HotChats(hot_messages_per_minute)
        self._begun = False
        self._grown_at: float | None = None
        """When the log said that it has grown, until what grew is read."""
        self._base = 0
        """The highest base of all epochs that the feed has acted on."""
        self.position = START
        """Everything up to here has been delivered."""

    async def run(self, after: Position | None = None) -> None:
        """Deliver what follows ``after``. None: start at the end of the log, because
        users who are not connected yet will sync.

        Runs until cancelled. A fatal error is counted and raised, so that a supervisor
        restarts this task. It then continues where it stopped and skips nothing.
        """
        try:
            if not self._begun:
                if after is None:
                    await self._take_end()
                else:
                    self.position = after
                self._begun = True
            while True:
                await self._batch()
        except Exception as error:
            is_defect = not isinstance(error, Unavailable | OutcomeUnknown)
            telemetry.fanout_ended(error, is_defect=is_defect)
            raise

    async def _batch(self) -> None:
        entries, reached = await self._read()
        if not entries:
            self.position = reached
            await self._wait()
            return
        # Everybody's texts pass here: what concerns events only looks at them once.
        events = [e for e in entries if not isinstance(e.what, Message) or e.what.kind != "text"]
        if self._raises_all(events):
            await self._take_end()
            return
        read_at = self._clock.monotonic()
        if self._grown_at is not None:
            telemetry.message_step("publish", read_at - self._grown_at)
            self._grown_at = None
        self._watch(entries)
        for event in events:
            self._deps.members.forget(event.chat_id)
        self._count(entries)
        await self._deliver_or_dead_letter(entries)
        telemetry.message_step("fan_out", self._clock.monotonic() - read_at)
        self.position = reached
        self._measure_delay(entries)
        if len(entries) < self._read_entries_max:
            await self._wait()

    async def _wait(self) -> None:
        """Return when more may have come. A read that was not full is at the end of the
        log, or nearly so: reading once more, to find nothing, would cost as much.
        """
        telemetry.fanout_lag(0)
        try:
            await self._deps.log.wait(self.position)
        except (Unavailable, OutcomeUnknown):
            telemetry.dependency_up("eventlog", False)
            await asyncio.sleep(self._backoff.bound(1))
            return  # the next read finds out when it is back
        self._grown_at = self._clock.monotonic()
        # The acks of the commit are queued first: they and the messages of a connection
        # leave in one write.
        await asyncio.sleep(0)

    async def _read(self) -> tuple[Sequence[LogEntry], Position]:
        """The next entries and the position behind them. Empty after an entry that
        cannot be decoded became a dead letter; the next round reads on behind it.
        """
        try:
            return await self._patiently(
                lambda: self._deps.log.read(self.position, self._read_entries_max)
            )
        except UnreadableEvent as event:
            await self._dead_letter("undecodable", event, event.message, event.data)
            return (), self.position.moved(event.shard, event.offset)
        except LogLost:
            telemetry.log_lost("fanout", self.position.offsets)
            await self._take_end()
            return (), self.position

    async def _take_end(self) -> None:
        """Go on at the end of the log; what came before it is in the store."""
        self.position = await self._patiently(self._deps.log.end)
        self._is_higher(self.position.base)
        self._gaps = Gaps()
        self._deps.members.forget_all()
        await self._deps.receiver.on_log_lost()

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Retry while the log is unavailable: there is nothing else to do."""
        failures = 0
        while True:
            try:
                answer = await ask()
                telemetry.dependency_up("eventlog", True)
                return answer
            except (Unavailable, OutcomeUnknown):
                telemetry.dependency_up("eventlog", False)
                failures += 1
                await asyncio.sleep(self._backoff.bound(failures))

    def _raises_all(self, events: Sequence[LogEntry]) -> bool:
        """Whether the batch says, for the first time, that all epochs were raised.
        Every shard says it.
        """
        bases = (e.what.base for e in events if isinstance(e.what, AllEpochsRaised))
        return self._is_higher(max(bases, default=0))

    def _is_higher(self, base: int) -> bool:
        """Whether all epochs were raised since. A position of the old base is lost, so
        the end of the log may show it before an entry does.
        """
        if base <= self._base:
            return False
        if self._begun:
            telemetry.epochs_raised(base)
        self._base = base
        return True

    def hot_chats(self) -> Mapping[str, int]:
        """The hot chats of the last full minute, with their messages."""
        return self._hot.hot(self._clock.monotonic())

    def _count(self, entries: Sequence[LogEntry]) -> None:
        if missing := self._gaps.missing(entries):
            telemetry.sequence_gap(missing)
        self._hot.count(entries, self._clock.monotonic())
        telemetry.hot_chats(len(self.hot_chats()))

    async def _deliver_or_dead_letter(self, entries: Sequence[LogEntry]) -> None:
        """Deliver a batch. If a defect in our code stops it, deliver the entries one by
        one and make each that fails a dead letter: one event must not block all others.
        """
        try:
            unreadable = self._deps.receiver.deliver(entries)
        except HoldfastError:
            raise
        except Exception as error:
            telemetry.defect("fanout", error)
            if len(entries) > 1:
                for entry in entries:
                    await self._deliver_or_dead_letter([entry])
            else:
                await self._dead_letter("defect", entries[0], repr(error), _shown(entries[0]))
        else:
            for entry in unreadable:
                reason = "the event does not say what it changes"
                await self._dead_letter("event", entry, reason, _shown(entry))

    async def _dead_letter(
        self, reason: str, event: LogEntry | UnreadableEvent, message: str, data: bytes
    ) -> None:
        at = timestamp(self._clock.now())
        found = (event.shard, event.offset, reason, message, data[:DATA_BYTES_MAX], at)
        await self._deps.dead_letters.put(DeadLetter(*found, event.tenant, event.chat_id))

    def _measure_delay(self, entries: Sequence[LogEntry]) -> None:
        """How late the oldest message of a batch is delivered."""
        oldest = next((e.what for e in entries if isinstance(e.what, Message)), None)
        if oldest is not None:
            stamped = datetime.fromisoformat(oldest.created_at).timestamp()
            telemetry.delivery_lag(max(self._clock.now() - stamped, 0.0))


def _shown(entry: LogEntry) -> bytes:
    """The entry for an operator, without a member's text: that is in its chat."""
    if isinstance(entry.what, Message) and entry.what.kind == "text":
        entry = replace(entry, what=replace(entry.what, content=""))
    return msgspec.json.encode(entry)
