"""What every bus promises: each notification to every other node, at most once, and
never a wait for the publisher.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import asyncpg
import pytest
from redis.asyncio import Redis
from scripted_durability import ANNA

from engines import Server
from holdfast.drivers.postgres_database import Database, DatabaseUse, PostgresSettings
from holdfast.fanout.bus.contract import (
    Bus,
    Notification,
    PresenceChanged,
    RevocationsChanged,
    TypingChanged,
)
from holdfast.fanout.bus.memory import MemoryBus, MemoryHub
from holdfast.fanout.bus.postgres import PostgresBus
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


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def cut_nothing(_server: Server | None) -> None:
    """The nodes of one process have no connections."""


async def cut_redis(server: Server | None) -> None:
    assert server is not None
    async with Redis.from_url(server.url) as client:
        for kind in ("pubsub", "normal"):
            await client.execute_command("CLIENT", "KILL", "TYPE", kind)


async def cut_postgres(server: Server | None) -> None:
    assert server is not None
    async with _connected(server.url) as connection:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )


async def say_nothing(_server: Server | None, _channel: str, _payload: bytes) -> None:
    """Nobody else speaks to the nodes of one process."""


async def say_by_redis(server: Server | None, channel: str, payload: bytes) -> None:
    assert server is not None
    async with Redis.from_url(server.url) as client:
        await client.publish(channel, payload)


async def say_by_postgres(server: Server | None, channel: str, payload: bytes) -> None:
    """It carries text only."""
    assert server is not None
    async with _connected(server.url) as connection:
        text = payload.decode(errors="replace")
        await connection.execute("SELECT pg_notify($1, $2)", channel, text)


def memory(_server: Server | None, _channel: str) -> Callable[[str], Bus]:
    hub = MemoryHub()
    return lambda sender: MemoryBus(sender, hub)


def redis(server: Server | None, channel: str) -> Callable[[str], Bus]:
    assert server is not None
    url = server.url
    return lambda sender: RedisBus(url, sender, channel)


def postgres(server: Server | None, channel: str) -> Callable[[str], Bus]:
    assert server is not None
    settings = PostgresSettings(server.url, connections_max=1)
    use = DatabaseUse("fanout", "bus")
    return lambda sender: PostgresBus(Database(settings, use), sender, channel)


class Rig(NamedTuple):
    make: Callable[[Server | None, str], Callable[[str], Bus]]
    cut: Callable[[Server | None], Awaitable[None]]
    """Breaks every connection to the engine."""
    say: Callable[[Server | None, str, bytes], Awaitable[None]]
    """Another program publishes on a channel."""
    engine: str | None = None


RIGS = {
    "memory": Rig(memory, cut_nothing, say_nothing),
    "redis": Rig(redis, cut_redis, say_by_redis, "redis_server"),
    "postgres": Rig(postgres, cut_postgres, say_by_postgres, "postgres_server"),
}


class Nodes:
    """Makes nodes of one bus, by their names, that reach each other."""

    def __init__(self, rig: Rig, server: Server | None) -> None:
        self._channel = f"bus_{next(CHANNELS)}"
        self._bus_of = rig.make(server, self._channel)
        self._rig = rig
        self._server = server

    async def cut(self) -> None:
        await self._rig.cut(self._server)

    async def say(self, payload: bytes) -> None:
        await self._rig.say(self._server, self._channel, payload)

    @asynccontextmanager
    async def __call__(self, *senders: str) -> AsyncIterator[list[BusNode]]:
        made = [BusNode(self._bus_of(sender)) for sender in senders]
        tasks = [asyncio.create_task(node.bus.run()) for node in made]
        await all_connected(made)
        yield made
        for task in tasks:
            assert not task.done()
            task.cancel()
        async with asyncio.timeout(ARRIVES_SECONDS):
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(params=RIGS)
def nodes(request: pytest.FixtureRequest) -> Nodes:
    rig = RIGS[request.param]
    return Nodes(rig, None if rig.engine is None else request.getfixturevalue(rig.engine))


async def all_connected(made: list[BusNode]) -> None:
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
GARBAGE = (b"", b"\xff\xfe", b"[]", b'{"sender": 1}', b"[" * 5_000, b'{"type":"presence"}')


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


async def test_nodes_reach_each_other_again_after_every_connection_was_cut(nodes: Nodes) -> None:
    async with nodes("one", "two") as both:
        await nodes.cut()
        both[0].bus.publish(LAST)  # it may be lost
        await all_connected(both)


async def test_garbage_on_the_channel_costs_no_notification_before_or_after_it(
    nodes: Nodes,
) -> None:
    async with nodes("one", "two") as (one, two):
        for number, garbage in enumerate(GARBAGE):
            await nodes.say(garbage)
            one.bus.publish(typing(number))
            await two.until(typing(number))
        assert two.got == [typing(number) for number in range(len(GARBAGE))]
