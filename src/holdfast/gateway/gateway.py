"""The connections of this node: what reaches them, when they are due, how they end.

The gateway has no state beyond its sockets. It delivers the entries of the event log to
the sessions on its roster, calls ``tick`` for every session that is due, checks its
memory budget, and drains when the node stops. It never waits for a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from msgspec.structs import replace

from holdfast import telemetry
from holdfast.access.principal import Principal
from holdfast.clock import Turns, wait_at_most
from holdfast.fanout.routing import DeliveryStep, route
from holdfast.gateway.connection import Connection
from holdfast.gateway.contract import GatewayDeps, Socket
from holdfast.gateway.cutoff import Cutoff
from holdfast.gateway.growing_replies import GrowingReplies
from holdfast.gateway.memory_budget import MemoryBudget
from holdfast.gateway.roster_sync import RosterSync
from holdfast.gateway.transport.linger import LINGER_SECONDS
from holdfast.message import Cursor, LogEntry, Message, User
from holdfast.session.outbound import WAKE
from holdfast.session.roster import Roster
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.codec import EncodedRun

TICK_SECONDS = 0.25
GATHER_SECONDS = 0.01
"""After a read of joined chats, those that come within this time share the next."""
LINES_AT_ONCE = 100
"""Lines of one log event per ``LINES_SECONDS``; a last line counts those left out."""
LINES_SECONDS = 5.0
RETURNS_PER_SECOND = 500
"""Clients closed together are asked to reconnect at this rate, spread over at most
``reconnect_spread_seconds``."""


class PresenceListener(Protocol):
    """Learns from the gateway which devices are connected and who is typing."""

    def on_connected(self, user: User, device_id: str, connection_id: str) -> None:
        """A connection is established. One that never is (its chats cannot be read)
        must not displace its device's next one at another node.
        """
        ...

    def on_disconnected(self, connection_id: str) -> None:
        """Such a connection has ended."""
        ...

    def typing(self, user: User, chat_id: str, active: bool) -> None: ...


class Gateway:
    """Every connection of this node. ``async with`` owns its tasks; leaving drains."""

    def __init__(
        self,
        deps: GatewayDeps,
        presence: PresenceListener,
        memory_budget_bytes: int,
        connection_type: Callable[..., Connection] = Connection,
    ) -> None:
        self._deps = deps
        self._presence = presence
        self._connection_type = connection_type
        self._connections: dict[str, Connection] = {}
        self._roster: Roster[Connection] = Roster(deps.settings.connections_per_user)
        self._dirty: list[Connection] = []
        self._dirty_since = 0.0
        self._ticked_at = deps.clock.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.Task[None]] = []
        self.cutoff = Cutoff(deps, self._roster, self._connections.values)
        self.roster_sync = RosterSync(self._roster, deps.history, deps.clock, deps.rng, deps.retry)
        self.replies = GrowingReplies(self._roster, _give_up)
        self.memory_budget = MemoryBudget(memory_budget_bytes)
        self._log = telemetry.ThrottledLog(LINES_AT_ONCE, LINES_SECONDS)
        self._empty = asyncio.Event()
        self.draining = False

    async def __aenter__(self) -> Gateway:
        heartbeat = self._deps.settings.timeouts.heartbeat_interval_seconds
        self._timers = [
            asyncio.create_task(_every(TICK_SECONDS, self._tick)),
            asyncio.create_task(_every(heartbeat, self.roster_sync.compare_heads)),
            asyncio.create_task(_every(heartbeat, self.roster_sync.compare_memberships)),
            asyncio.create_task(_every(GATHER_SECONDS, self.roster_sync.read_joined)),
            asyncio.create_task(_every(GATHER_SECONDS, self.roster_sync.settle_doubts)),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.drain()
        await self.cutoff.stop()
        for task in [*self._timers, *self._tasks]:
            task.cancel()
        await asyncio.gather(*self._timers, *self._tasks, return_exceptions=True)

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def open_connections(self) -> Collection[Connection]:
        return list(self._connections.values())

    @property
    def roster(self) -> Roster[Connection]:
        return self._roster

    def now(self) -> float:
        return self._deps.clock.monotonic()

    def accept(
        self,
        socket: Socket,
        principal: Principal | None,
        device_id: str,
        identify: Callable[[Principal], None] = lambda principal: None,
    ) -> Connection:
        """Make a connection of a socket whose handshake was accepted.

        Without a principal the first frame must authenticate; ``identify`` may refuse
        it.
        """
        connection = self._connection_type(self._deps, self, socket, device_id, identify)
        self._connections[connection.connection_id] = connection
        telemetry.connection_opened(len(self._connections))
        if principal is not None:
            connection.open(principal)
        return connection

    # --- called by the feed -----------------------------------------------------------

    def deliver(self, entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
        """Queue committed messages to the sessions of their chats, and apply the events
        in between. Returns the events that do not say what they change.
        """
        now = self._deps.clock.monotonic()
        delivered = 0
        unreadable: list[LogEntry] = []
        steps = route(entries, self._roster.chats)
        for step in steps:
            if step.messages:
                run = EncodedRun(self._proven(step), step.epoch)
                delivered += self._deliver_run(run, now, alone=len(steps) == 1)
            if step.ends_with is not None and not self.roster_sync.apply(step.ends_with):
                unreadable.append(step.ends_with)
        telemetry.delivered(delivered)
        _count_messages(entries, steps)
        return unreadable

    async def on_log_lost(self) -> None:
        await self.roster_sync.on_log_lost()

    def _proven(self, step: DeliveryStep) -> list[Message]:
        """Add the cursor proofs: once per message, not per connection, because the
        frame too is encoded only once.
        """
        prove, tenant, chat_id, epoch = self._deps.proofs.of, step.tenant, step.chat_id, step.epoch
        return [
            replace(message, proof=prove(tenant, chat_id, Cursor(epoch, message.sequence)))
            for message in step.messages
        ]

    def _deliver_run(self, run: EncodedRun, now: float, *, alone: bool) -> int:
        """The hot path: nothing is done per connection that can be done per run.

        A lone run bypasses lanes in which nothing waits. Several runs go through the
        lanes, which make one write per connection: 16 messages cost about 1 µs each
        instead of 10.
        """
        connections = self._roster.in_chat(run.chat_id)
        writes: list[Callable[[bytes], None]] = []
        # All connections are checked before the first is written to. A system call in
        # between leaves the processor's caches cold for the next check: 3 µs instead of
        # 0.3 µs each (docs/internals/speed.md).
        for connection in connections:
            try:
                if alone and not connection.paused and connection.session.deliver_at_once(run):
                    writes.append(connection.write)
                    continue
                steps = connection.session.deliver(run, now)
                if steps is WAKE:  # nearly always; saves the ``match`` over effects
                    self.wake(connection)
                elif steps:
                    connection.do(steps)
            except Exception as error:
                _give_up(connection, error)
        data = run.data
        for write in writes:
            try:
                write(data)
            except Exception as error:
                # Searched only now: to keep the connections beside their writes would
                # cost every delivery something.
                _give_up(next(c for c in connections if c.write is write), error)
        return len(connections) * run.count

    async def push_to_chats(
        self, chat_ids: Iterable[str], key: tuple[str, ...], frame: bytes
    ) -> None:
        """Queue an ephemeral frame once to each session in these chats.

        It yields to the loop between chats: a user may have a hundred chats of a
        hundred members each.
        """
        turns = Turns(self._deps.clock)
        pushed: set[Connection] = set()
        for chat_id in chat_ids:
            await turns.give_way()
            found = [
                connection
                for connection in self._roster.in_chat(chat_id)
                if connection not in pushed
            ]
            self._push(found, key, frame)
            pushed.update(found)

    def push_to_user(self, user: User, chat_id: str, key: tuple[str, ...], frame: bytes) -> None:
        """Queue an ephemeral frame to a user's sessions that are in this chat."""
        self._push((c for c in self._roster.of_user(user) if chat_id in c.chats), key, frame)

    def close_displaced(self, connection_ids: Iterable[str]) -> None:
        """Close those of these connections that are here: newer ones displaced them."""
        for connection_id in connection_ids:
            if (connection := self._connections.get(connection_id)) is not None:
                try:
                    connection.close(CloseReason.DUPLICATE_CONNECTION)
                except Exception as error:
                    _give_up(connection, error)

    def _push(self, connections: Iterable[Connection], key: tuple[str, ...], frame: bytes) -> None:
        for connection in connections:
            connection.do(connection.session.ephemeral(key, frame))

    # --- called by connections (ConnectionHost) ---------------------------------------

    def on_opened(self, connection: Connection, now: float) -> None:
        for displaced in self._roster.add(connection):
            displaced.close(CloseReason.DUPLICATE_CONNECTION)

    async def read_memberships(self, connection: Connection) -> Mapping[str, Cursor]:
        return await self.roster_sync.read_memberships(connection)

    def on_established(self, connection: Connection) -> None:
        self._roster.establish(connection)
        self._presence.on_connected(connection.user, connection.device_id, connection.connection_id)
        self.replies.on_established(connection)

    def on_lost(self, connection: Connection) -> None:
        if self._connections.pop(connection.connection_id, None) is None:
            return
        self.cutoff.forget(connection)
        if connection.authenticated:
            self._roster.remove(connection)
        if connection.established:
            self._presence.on_disconnected(connection.connection_id)
        telemetry.connection_ended(len(self._connections))
        if not self._connections:
            self._empty.set()

    def wake(self, connection: Connection) -> None:
        if connection.dirty:
            return
        connection.dirty = True
        if not self._dirty:
            self._dirty_since = self._deps.clock.monotonic()
            asyncio.get_running_loop().call_soon(self._flush)
        self._dirty.append(connection)

    def typing(self, user: User, chat_id: str, active: bool) -> None:
        self._presence.typing(user, chat_id, active)

    def spread_ms(self) -> int:
        """A random delay that spreads returning clients.

        A node that has just started must read the memberships of each.
        """
        seconds = min(
            self._deps.settings.reconnect_spread_seconds,
            len(self._connections) / RETURNS_PER_SECOND,
        )
        return int(self._deps.rng.random() * seconds * 1000)

    def log(self, connection: Connection, event: str, **facts: str) -> None:
        who = connection.user._asdict() if connection.authenticated else {}
        self._log.info(event, connection_id=connection.connection_id, **who, **facts)

    def start(self, connection: Connection, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._finished, connection))

    def _finished(self, connection: Connection, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _give_up(connection, error)

    def _flush(self) -> None:
        """Write everything this turn of the loop queued, one write per connection."""
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            try:
                connection.flush()
            except Exception as error:
                _give_up(connection, error)
        telemetry.message_step("write", self._deps.clock.monotonic() - self._dirty_since)

    # --- timers -----------------------------------------------------------------------

    async def _tick(self) -> None:
        now = self._deps.clock.monotonic()
        telemetry.connections_open(len(self._connections) * (now - self._ticked_at))
        self._ticked_at = now
        waiting = 0
        for connection in list(self._connections.values()):
            if now >= connection.due:
                try:
                    connection.tick(now)
                except Exception as error:
                    _give_up(connection, error)
            if connection.paused:  # a socket that is not paused has nothing waiting
                waiting += connection.waiting_bytes
        self.cutoff.tick(now)
        self.memory_budget.check(waiting, self.open_connections)
        patience = self._deps.settings.upstream_failure_close_seconds
        if patience and self._deps.sends_failing_seconds() >= patience:
            self._close_all(CloseReason.UPSTREAM_FAILURE)

    # --- drain ------------------------------------------------------------------------

    async def drain(self) -> None:
        """Accept no more, answer open requests, then close every connection."""
        if self.draining:
            return
        self.draining = True
        clock = self._deps.clock
        end = clock.monotonic() + self._deps.settings.shutdown.drain_timeout_seconds
        while self._connections and clock.monotonic() < end:
            for connection in list(self._connections.values()):
                if not connection.open_requests:
                    connection.close(CloseReason.SERVER_SHUTDOWN)
            self._empty.clear()
            if self._connections:
                await wait_at_most(self._empty, min(TICK_SECONDS, end - clock.monotonic()))
        self._close_all(CloseReason.SERVER_SHUTDOWN)
        self._empty.clear()
        if self._connections:  # let the clients read the reason before the process ends
            await wait_at_most(self._empty, LINGER_SECONDS)

    def _close_all(self, closing: CloseReason) -> None:
        for connection in list(self._connections.values()):
            connection.close(closing)


def _give_up(connection: Connection, error: BaseException) -> None:
    """Abort a connection that met a defect, and go on with the others."""
    telemetry.defect("gateway", error)
    telemetry.connection_aborted()
    connection.abort()


def _count_messages(entries: Sequence[LogEntry], steps: Sequence[DeliveryStep]) -> None:
    """Count what concerned a session here, and what nobody here is in the chat of."""
    here = sum(len(step.messages) for step in steps)
    ends = (step.ends_with for step in steps)
    events = sum(end is not None and not isinstance(end.what, Message) for end in ends)
    telemetry.handed_over(here)
    if nobody := len(entries) - here - events:
        telemetry.delivery_skipped("offline", nobody)


async def _every(seconds: float, do: Callable[[], Awaitable[None]]) -> None:
    """Repeat until cancelled; a failure is reported as a defect."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await do()
        except Exception as error:
            telemetry.defect("gateway", error)
