"""How one life of a node reaches what the nodes share: store, log, registry, bus.

A link may be cut, for some dependencies and in one direction: then requests do not
arrive, or arrive late, or their replies are lost. A node that was killed reaches
nothing any more. Everything that a node runs has its link as ``OWNER``, so that the
loop can pause it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, cast

from holdfast.clock import wait_at_most
from holdfast.errors import HoldfastError, OutcomeUnknown, Unavailable
from holdfast.eventlog.contract import LogLost
from holdfast.fanout.bus.memory import MemoryBus
from holdfast.message import Draft
from holdfast.store.memory import MemoryStore
from holdfast.store.numbering import GroupState
from proof.faults import Fault
from proof.simulation.shared import FaultyHub
from proof.virtual_loop import OWNER

T = TypeVar("T")

Dependency = Literal["store", "log", "leases", "jobs", "registry", "bus"]
ENGINE: frozenset[Dependency] = frozenset({"store", "log", "leases"})
"""What one engine is for all nodes: it fails over as a whole."""
GIVE_UP_SECONDS = 4.0
"""When an adapter gives up a call without an answer: its statement timeout."""
WRITES = frozenset({"append", "change", "mark", "enqueue", "register", "unregister", "leave"})


@dataclass(eq=False)
class Cut:
    """A link that is cut until ``healed``. ``loses`` "late": requests arrive then."""

    dependencies: frozenset[Dependency]
    loses: Literal["requests", "replies", "late"]
    healed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class NodeLink:
    """One life of the node ``name``. ``during`` is entered for each disturbed call."""

    name: str
    during: Callable[[str, Fault], AbstractContextManager[None]]
    is_engine_up: Callable[[], bool]
    dead: bool = False
    cut: Cut | None = None
    clients: dict[str, float] = field(default_factory=dict)
    """Who used it, and until when; connected ones for ever."""
    context: Context = field(default_factory=Context)
    _late: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.context.run(OWNER.set, self)

    def run(self, call: Callable[..., T], *args: Any) -> T:
        """Run a part of the node."""
        return self.context.copy().run(call, *args)

    def start(self, call: Callable[[], Any]) -> asyncio.Task[Any]:
        """Start a task of the node; another one may wait for it."""
        return asyncio.get_running_loop().create_task(call(), context=self.context.copy())

    def served_since(self, at: float) -> Sequence[str]:
        """Its clients at this time or later; never empty, which would mean all."""
        return [self.name, *(client for client, until in self.clients.items() if until >= at)]

    def on_client(self, client: str) -> None:
        self.clients[client] = math.inf

    def on_client_elsewhere(self, client: str, now: float) -> None:
        if self.clients.get(client) == math.inf:
            self.clients[client] = now

    def is_cut_from(self, dependency: Dependency) -> bool:
        return self.cut is not None and dependency in self.cut.dependencies

    async def carry(self, dependency: Dependency, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make one call, as far as the link lets it through."""
        if self.dead:
            await asyncio.get_running_loop().create_future()
        if dependency in ENGINE and not self.is_engine_up():
            with self.during(verb, Fault.FAIL):
                raise Unavailable(f"{verb}: the engine fails over")
        if self.cut is None or dependency not in self.cut.dependencies:
            return await call()
        with self.during(verb, Fault.HANG):
            await self._lose(self.cut, call, may_arrive=dependency != "registry")
        if verb in WRITES:
            raise OutcomeUnknown(f"{verb}: no answer")
        raise Unavailable(f"{verb}: no answer")

    async def _lose(
        self, cut: Cut, call: Callable[[], Awaitable[Any]], *, may_arrive: bool
    ) -> None:
        """The registry stamps what arrives: from it no call that was given up arrives
        late, or it would displace a newer connection.
        """
        if cut.loses == "replies":
            with suppress(HoldfastError, LogLost):
                await call()
        elif cut.loses == "late" and may_arrive:
            arriving = asyncio.get_running_loop().create_task(
                self._arrive(cut, call), context=Context()
            )
            self._late.add(arriving)
            arriving.add_done_callback(self._late.discard)
        await wait_at_most(cut.healed, GIVE_UP_SECONDS)

    async def _arrive(self, cut: Cut, call: Callable[[], Awaitable[Any]]) -> None:
        """The network delivers a request after its sender gave up."""
        await cut.healed.wait()
        with suppress(HoldfastError, LogLost):
            await call()


class Reached:
    """A dependency as a node reaches it. Waiting for the log only looks."""

    def __init__(self, inner: object, link: NodeLink, dependency: Dependency) -> None:
        self._inner, self._link, self._dependency = inner, link, dependency

    def __getattr__(self, verb: str) -> Any:
        inner = getattr(self._inner, verb)
        if verb == "wait":
            return inner

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._link.carry(self._dependency, verb, partial(inner, *args, **kwargs))

        setattr(self, verb, call)  # looked up once
        return call


def reached(inner: T, link: NodeLink, dependency: Dependency) -> T:
    """``inner`` behind a link: the same verbs, the same types."""
    return cast(T, Reached(inner, link, dependency))


class ReachedStore(Reached):
    """The disk's store."""

    def __init__(self, store: MemoryStore, link: NodeLink) -> None:
        super().__init__(store, link, "store")
        self._store = store
        self.grouping = store.grouping
        self.lane = store.lane

    def peek(self, group: Sequence[Draft]) -> GroupState:
        """The store's records of a group, for a control that predicts commits."""
        return self._store._group_state(group)


class NodeBus(MemoryBus):
    """The bus at one node: a cut loses payloads, in its own direction only."""

    def __init__(self, sender: str, hub: FaultyHub, link: NodeLink) -> None:
        super().__init__(sender, hub)
        self._link = link

    async def run(self) -> None:
        receivers = self._hub.receivers
        receivers.append(self._receive)
        try:
            await self._outbox.run(self._send)
        finally:
            receivers.remove(self._receive)

    async def _send(self, payload: bytes) -> None:
        if not self._link.dead and not self._loses("requests", "late"):
            await self._hub.send(payload)

    def _receive(self, payload: bytes) -> None:
        if not self._loses("replies", "late"):
            asyncio.get_running_loop().call_soon(
                self._inbox.on_payload, payload, context=self._link.context
            )

    def _loses(self, *directions: str) -> bool:
        cut = self._link.cut
        return cut is not None and "bus" in cut.dependencies and cut.loses in directions
