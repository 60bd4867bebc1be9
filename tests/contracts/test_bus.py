"""What every bus promises: each notification to every other node, at most once, and
never a wait for the publisher.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from scripted_durability import ANNA

from engines import Server
from holdfast.fanout.bus.contract import (
    Bus,
    Notification,
    PresenceChanged,
    RevocationsChanged,
    TypingChanged,
)
from holdfast.fanout.bus.memory import MemoryBus, MemoryHub
from holdfast.fanout.bus.redis import RedisBus

CHANNELS = itertools.count()
ARRIVES_SECONDS = 5.0


class BusNode:
    """A node on the bus: what it was notified of, and whether so much has come."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.got: list[Notification] = []
        self._news = asyncio.Event()
        bus.subscribe(self._on_notification)

    def _on_notification(self, notification: Notification) -> None:
        self.got.append(notification)
        self._news.set()

    async def until(self, *notifications: Notification) -> None:
        """Wait until these have arrived, in any order."""
        async with asyncio.timeout(ARRIVES_SECONDS):
            while not set(self.got).issuperset(notifications):
                self._news.clear()
                await self._news.wait()


def memory(_server: Server | None) -> Callable[[str], Bus]:
    hub = MemoryHub()
    return lambda sender: MemoryBus(sender, hub)


def redis(server: Server | None) -> Callable[[str], Bus]:
    assert server is not None
    url, channel = server.url, f"bus-{next(CHANNELS)}"
    return lambda sender: RedisBus(url, sender, channel)


RIGS: dict[str, tuple[Callable[[Server | None], Callable[[str], Bus]], str | None]] = {
    "memory": (memory, None),
    "redis": (redis, "redis_server"),
}
Nodes = Callable[..., AbstractAsyncContextManager[list[BusNode]]]


@pytest.fixture(params=RIGS)
def nodes(request: pytest.FixtureRequest) -> Nodes:
    """Makes nodes of one bus, by their names, that reach each other."""
    make, engine = RIGS[request.param]
    bus_of = make(None if engine is None else request.getfixturevalue(engine))

    @asynccontextmanager
    async def running(*senders: str) -> AsyncIterator[list[BusNode]]:
        made = [BusNode(bus_of(sender)) for sender in senders]
        tasks = [asyncio.create_task(node.bus.run()) for node in made]
        await _all_connected(made)
        yield made
        for task in tasks:
            assert not task.done()
            task.cancel()
        async with asyncio.timeout(ARRIVES_SECONDS):
            await asyncio.gather(*tasks, return_exceptions=True)

    return running


async def _all_connected(made: list[BusNode]) -> None:
    """Publish until each has heard each other: a subscription may come late."""
    for n, node in enumerate(made):
        others = [other for other in made if other is not node]
        async with asyncio.timeout(ARRIVES_SECONDS):
            for attempt in itertools.count():
                hello = TypingChanged(ANNA, f"hello {n} {attempt}", active=True)
                node.bus.publish(hello)
                await asyncio.sleep(0.05)
                if all(hello in other.got for other in others):
                    break
    for node in made:
        node.got.clear()


def typing(n: int) -> Notification:
    return TypingChanged(ANNA, f"chat-{n}", active=True)


LAST = RevocationsChanged()


async def test_notification_reaches_every_other_node_once_and_not_its_own(nodes: Nodes) -> None:
    async with nodes("one", "two", "three") as (one, two, three):
        one.bus.publish(typing(1))
        await two.until(typing(1))
        await three.until(typing(1))
        two.bus.publish(LAST)
        await one.until(LAST)
        await three.until(LAST)
        assert one.got == [LAST]
        assert two.got == [typing(1)]
        assert sorted(three.got, key=str) == sorted([typing(1), LAST], key=str)


async def test_equal_notifications_published_together_arrive_once(nodes: Nodes) -> None:
    async with nodes("one", "two") as (one, two):
        for _ in range(100):
            one.bus.publish(typing(1))
        one.bus.publish(LAST)
        await two.until(typing(1), LAST)
        assert len(two.got) == 2


async def test_thousands_of_notifications_arrive_whole(nodes: Nodes) -> None:
    """More than one payload, whatever its bound."""
    async with nodes("one", "two") as (one, two):
        many = [typing(n) for n in range(3_000)]
        for notification in many:
            one.bus.publish(notification)
        await two.until(*many)
        assert len(two.got) == len(many)


async def test_largest_presence_passes_and_text_arrives_as_it_was(nodes: Nodes) -> None:
    async with nodes("one", "two") as (one, two):
        chats = tuple(f"chat_{n:026}" for n in range(100))
        large = PresenceChanged(ANNA, "online", 2**53 - 1, chats)
        odd = TypingChanged(ANNA._replace(user_id="ä'\"\\\n\t💬 $$ \x7f"), "{chat}", active=False)
        one.bus.publish(large)
        one.bus.publish(odd)
        await two.until(large, odd)


async def test_node_that_joins_later_is_reached_from_then_on(nodes: Nodes) -> None:
    async with nodes("one", "two") as (one, two):
        one.bus.publish(typing(1))
        await two.until(typing(1))
        async with nodes("three", "four") as (three, _):
            one.bus.publish(LAST)
            await three.until(LAST)
            assert typing(1) not in three.got
        one.bus.publish(typing(2))
        await two.until(typing(2))
