"""What a node has in the pool: a place for each reply that wants to run or runs.

A node keeps its own lists and describes them with each heartbeat by counts and sums. A
place is in one of them from the first answer on, until it is released:

    asked ─┬─> refused              the queue is full
           ├─> waiting ──> leased   granted and confirmed
           └─> leased ──> moving ──> waiting or leased, in another pool

``moving`` still counts as a lease: the pool has not answered yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Literal
from zlib import crc32

from holdfast.errors import HoldfastError
from holdfast.streaming.pool.contract import POSITIONS_MAX, FullCause, NodeBeat, PoolRequest

PlaceState = Literal["asked", "waiting", "leased", "moving", "refused", "released"]
_UNDECIDED: tuple[PlaceState, ...] = ("asked",)
_NOT_LEASED: tuple[PlaceState, ...] = ("asked", "waiting", "moving")


class QueueFull(Exception):
    """It cannot run now, and it may not wait. ``cause``: whose bound was reached."""

    def __init__(self, cause: FullCause) -> None:
        super().__init__("the queue for replies is full")
        self.cause = cause


class PlaceReleased(HoldfastError):
    """Somebody else released the place while it was waited for."""


class PoolPlace:
    """A reply's place: in the queue, or active.

    ``position`` counts from 1 while it waits. ``eta_seconds`` is None if unknown.
    """

    __slots__ = (
        "_release", "_waiters", "crc", "eta_seconds", "full", "is_confirming", "is_granted",
        "is_sent", "on_change", "position", "request", "state",
    )  # fmt: skip

    def __init__(self, request: PoolRequest, release: Callable[[str], None]) -> None:
        self.request = request
        self.state: PlaceState = "asked"
        self.position = 0
        self.eta_seconds: float | None = None
        self.full: FullCause | None = None
        self.is_sent = False
        self.is_confirming = False
        self.is_granted = False
        """A wake-up came before the answer to the call that granted it."""
        self.crc = crc32(request.reply_id.encode())
        self._release = release
        self._waiters: tuple[asyncio.Future[None], ...] = ()
        self.on_change: Callable[[], None] | None = None
        """Called when its state changes, for who has no task to wait with."""

    @property
    def waiting(self) -> bool:
        return self.state == "waiting"

    async def decided(self) -> None:
        """Returns when it waits or is leased; QueueFull if it may do neither.

        Cancelling this or ``granted`` releases the place.
        """
        await self._leave(_UNDECIDED)

    async def granted(self) -> None:
        """Returns when it is leased and confirmed. Raises as ``decided``."""
        await self._leave(_NOT_LEASED)

    def notify(self) -> None:
        """Its state has changed."""
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self.on_change is not None:
            self.on_change()

    async def _leave(self, states: tuple[PlaceState, ...]) -> None:
        try:
            while self.state in states:
                waiter = asyncio.get_running_loop().create_future()
                self._waiters += (waiter,)  # an Event for each place would take 1 KB more
                await waiter
        except asyncio.CancelledError:
            self._release(self.request.reply_id)
            raise
        if self.full is not None:
            raise QueueFull(self.full)
        if self.state == "released":
            raise PlaceReleased("the place was released")


class NodePlaces:
    """A node's places and their sums."""

    def __init__(self) -> None:
        self._places: dict[str, PoolPlace] = {}
        self._waiting: dict[str, PoolPlace] = {}
        self._leases = self._leases_sum = self._waiting_sum = 0
        self._next_position = 0

    def __getitem__(self, reply_id: str) -> PoolPlace:
        return self._places[reply_id]

    def get(self, reply_id: str) -> PoolPlace | None:
        return self._places.get(reply_id)

    def add(self, place: PoolPlace) -> None:
        self._places[place.request.reply_id] = place

    def change(self, place: PoolPlace, state: PlaceState) -> None:
        """To another state, with what both count. An ended place is forgotten."""
        reply_id = place.request.reply_id
        if self._places.get(reply_id) is not place:
            return
        self._count(place, -1)
        place.state = state
        self._count(place, 1)
        if state == "waiting":
            self._waiting[reply_id] = place
        else:
            self._waiting.pop(reply_id, None)
            place.position, place.eta_seconds = 0, None
        if state in ("refused", "released"):
            del self._places[reply_id]
        place.notify()  # last: who is called may change it again

    def leases(self) -> Iterator[PoolPlace]:
        return (place for place in self._places.values() if place.state in ("leased", "moving"))

    def waiting(self) -> Iterator[PoolPlace]:
        return iter(self._waiting.values())

    def beat(self) -> NodeBeat:
        """What a heartbeat says; it asks for the positions of all in rotation."""
        first = self._next_position if self._next_position < len(self._waiting) else 0
        asked = list(self._waiting)[first : first + POSITIONS_MAX]
        self._next_position = first + len(asked)
        return NodeBeat(
            self._leases,
            self._leases_sum,
            len(self._waiting),
            self._waiting_sum,
            positions_of=asked,
        )

    def _count(self, place: PoolPlace, by: int) -> None:
        if place.state in ("leased", "moving"):
            self._leases += by
            self._leases_sum += by * place.crc
        elif place.state == "waiting":
            self._waiting_sum += by * place.crc
