"""Reads the log and delivers it to gateways: best effort, bounded.

For each batch: find the members (``members``), ask the registry where they are
connected, build one envelope per gateway (``routing``), hand it over (link), then move
the position. Deliveries that fail are counted and skipped, never queued: the session at
the far end sees the gap, or learns the head from its heartbeat, and its client syncs. A
failure here affects neither sends nor connections.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from holdfast import telemetry
from holdfast.access.proofs import CursorProofs
from holdfast.bounds import positive
from holdfast.clock import Clock, timestamp
from holdfast.errors import HoldfastError, OutcomeUnknown, Unavailable, UnreadableEvent
from holdfast.eventlog.contract import START, EventLog, Position
from holdfast.fanout.contract import Envelope, Link, MessageRun
from holdfast.fanout.dead_letters import DATA_BYTES_MAX, DeadLetter, DeadLetters
from holdfast.fanout.members import Members
from holdfast.fanout.registry.contract import Registry
from holdfast.fanout.routing import Gaps, envelopes, recipients, route, undeliverable
from holdfast.message import Cursor, LogEntry, Message, User
from holdfast.resilience import Backoff

T = TypeVar("T")

HANDOVER_SECONDS = 1.0
"""How long a gateway may take to accept an envelope. No setting: it is a local call."""
LOOKUP_SECONDS = 1.0
"""How long one lookup of members, or of gateways in the registry, may take. No setting:
all chats wait for it, and sync repairs what is skipped.
"""
RELOAD_PAUSE_SECONDS = 1.0
"""After a failed load of members, how long no other load is tried."""


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """How often a delivery to a gateway is tried."""

    max_attempts: int = 3
    """Attempts to deliver to a gateway, the first included; then the delivery is
    skipped and counted, and sync repairs it.
    """
    initial_backoff_ms: float = 100
    """The first wait between attempts."""
    max_backoff_ms: float = 1000
    """The longest wait between attempts."""

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.initial_backoff_ms / 1000, self.max_backoff_ms / 1000)


@dataclass(frozen=True, slots=True)
class FanoutDeps:
    """``here`` is this node's gateway, reached even if the registry is down."""

    log: EventLog
    members: Members
    registry: Registry
    link: Link
    dead_letters: DeadLetters
    proofs: CursorProofs
    here: str


class Fanout:
    """One reader of the log, up to ``read_entries_max`` per batch. ``watch`` is called
    with each batch before it is delivered.
    """

    def __init__(
        self,
        deps: FanoutDeps,
        clock: Clock,
        rng: random.Random,
        retry: RetrySettings | None = None,
        read_entries_max: int = 500,
        watch: Callable[[Sequence[LogEntry]], None] = lambda entries: None,
    ) -> None:
        self._deps = deps
        self._clock = clock
        self._rng = rng
        self._retry = retry or RetrySettings()
        self._read_entries_max = read_entries_max
        self._watch = watch
        self._load_again_at = 0.0
        self._gaps = Gaps()
        self._begun = False
        self.position = START
        """Delivery of everything up to here has been attempted."""

    async def run(self, after: Position | None = None) -> None:
        """Deliver what follows ``after``. None: start at the end of the log, because
        users who are not connected yet will sync.

        Runs until cancelled. A fatal error is counted and raised, so that a supervisor
        restarts this task. It then continues where it stopped and skips nothing.
        """
        try:
            if not self._begun:
                self.position = (
                    await self._patiently(self._deps.log.end) if after is None else after
                )
                self._begun = True
            while True:
                await self._batch()
        except Exception as error:
            telemetry.fanout_ended(error)
            raise

    async def _batch(self) -> None:
        entries, reached = await self._read()
        if not entries:
            self.position = reached
            await self._deps.log.wait(reached)
            return
        self._watch(entries)
        if missing := self._gaps.missing(entries):
            telemetry.sequence_gap(missing)
        await self._deliver_or_dead_letter(entries)
        self.position = reached
        await self._measure(entries)

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
            self.position = self.position.moved(event.shard, event.offset)
            return (), self.position

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
                await asyncio.sleep(self._retry.backoff.bound(failures))

    async def _deliver_or_dead_letter(self, entries: Sequence[LogEntry]) -> None:
        """Deliver a batch. If a defect in our code stops it, deliver the entries one by
        one and make each that fails a dead letter: one event must not block all others.
        """
        try:
            await self._deliver_batch(entries)
        except HoldfastError:
            raise
        except Exception as error:
            telemetry.defect("fanout", error)
            if len(entries) > 1:
                for entry in entries:
                    await self._deliver_or_dead_letter([entry])
            else:
                await self._dead_letter(
                    "defect", entries[0], repr(error), msgspec.json.encode(entries[0])
                )

    async def _deliver_batch(self, entries: Sequence[LogEntry]) -> None:
        chats = {
            entry.chat_id: entry.tenant for entry in entries if isinstance(entry.what, Message)
        }
        before = await self._members_of(chats)
        after = dict(before)
        runs, unknown, unreadable = route(map(self._with_proof, entries), after)
        self._remember_members(chats, before, after)
        for entry in unreadable:
            data = msgspec.json.encode(entry)
            await self._dead_letter("event", entry, "the event does not say what it changes", data)
        if unknown:
            telemetry.delivery_skipped("members_unknown", unknown)
        if runs:
            online = await self._users_by_gateway(runs)
            await asyncio.gather(
                *(
                    self._hand_over(gateway, envelope)
                    for gateway, envelope in envelopes(runs, online).items()
                )
            )

    def _with_proof(self, entry: LogEntry) -> LogEntry:
        """Add the cursor proof: once per message, not per connection, because the frame
        too is encoded only once.
        """
        message = entry.what
        if not isinstance(message, Message):
            return entry
        proof = self._deps.proofs.of(
            entry.tenant, entry.chat_id, Cursor(entry.epoch, message.sequence)
        )
        return replace(entry, what=replace(message, proof=proof))

    async def _members_of(self, chats: Mapping[str, str]) -> dict[str, frozenset[User]]:
        """The members of each chat that are known or can be loaded. After a failed load
        no other is tried for ``RELOAD_PAUSE_SECONDS``, so that a store in trouble
        delays a batch only once and does not hold back chats whose members are known.
        """
        found = {}
        for chat_id, tenant in chats.items():
            members = self._deps.members.known(chat_id)
            if members is None:
                members = await self._load(tenant, chat_id)
            if members is not None:
                found[chat_id] = members
        return found

    async def _load(self, tenant: str, chat_id: str) -> frozenset[User] | None:
        if self._clock.monotonic() < self._load_again_at:
            return None
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                return await self._deps.members.of(tenant, chat_id)
        except (HoldfastError, TimeoutError) as error:
            self._load_again_at = self._clock.monotonic() + RELOAD_PAUSE_SECONDS
            telemetry.log.warning(
                "fanout.members_load_failed", detail="skipping deliveries", error=str(error)
            )
            return None

    def _remember_members(
        self,
        chats: Mapping[str, str],
        before: Mapping[str, frozenset[User]],
        after: Mapping[str, frozenset[User]],
    ) -> None:
        """Remember the members as of the end of the batch. A chat with an unreadable
        event is loaded again.
        """
        for chat_id in chats:
            if chat_id not in after:
                self._deps.members.forget(chat_id)
            elif after[chat_id] is not before[chat_id]:
                self._deps.members.learn(chat_id, after[chat_id])

    async def _users_by_gateway(self, runs: Sequence[MessageRun]) -> Mapping[str, Set[User]]:
        users = recipients(runs)
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                online = await self._deps.registry.gateways_of(users)
        except (Unavailable, OutcomeUnknown, TimeoutError) as error:
            telemetry.registry_failed(error)
            telemetry.delivery_skipped("registry_down", sum(len(run.messages) for run in runs))
            return {self._deps.here: users}
        telemetry.dependency_up("registry", True)
        if nobody := undeliverable(runs, online):
            telemetry.delivery_skipped("offline", nobody)
        return online

    async def _hand_over(self, gateway: str, envelope: Envelope) -> None:
        """Try at most ``max_attempts`` times while the gateway is unreachable; then, or
        after a timeout, skip the envelope.
        """
        count = sum(len(run.messages) for run in envelope.runs)
        retry = self._retry
        for attempt in range(1, retry.max_attempts + 1):
            try:
                async with asyncio.timeout(HANDOVER_SECONDS):
                    await self._deps.link.deliver(gateway, envelope)
                telemetry.handed_over(count)
                return
            except TimeoutError:
                telemetry.delivery_skipped("timeout", count)
                return
            except Unavailable:
                if attempt < retry.max_attempts:
                    telemetry.delivery_retried()
                    await asyncio.sleep(retry.backoff.delay(attempt, self._rng))
        telemetry.delivery_skipped("unreachable", count)

    async def _dead_letter(
        self, reason: str, event: LogEntry | UnreadableEvent, message: str, data: bytes
    ) -> None:
        at = timestamp(self._clock.now())
        await self._deps.dead_letters.put(
            DeadLetter(event.shard, event.offset, reason, message, data[:DATA_BYTES_MAX], at)
        )

    async def _measure(self, entries: Sequence[LogEntry]) -> None:
        """Measure how far this reader is behind the log. The log is asked for its end
        only if the batch was full.
        """
        behind = 0
        if len(entries) == self._read_entries_max:
            behind = await self._patiently(lambda: self._deps.log.lag(self.position))
        telemetry.fanout_lag(behind)
        oldest = next((e.what for e in entries if isinstance(e.what, Message)), None)
        if oldest is not None:
            stamped = datetime.fromisoformat(oldest.created_at).timestamp()
            telemetry.delivery_lag(max(self._clock.now() - stamped, 0.0))
