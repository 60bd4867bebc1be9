"""A Redis that works and then answers garbage: registry and bus fail in time, name the
reason, and work again by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from registry_rig import connect
from scripted_durability import ANNA
from work_rigs import until

from engines import Server
from holdfast.errors import HoldfastError
from holdfast.fanout.bus.contract import KeysChanged, Notification
from holdfast.fanout.bus.redis import RedisBus
from holdfast.fanout.registry.redis import RedisRegistry

pytestmark = pytest.mark.real_time("uvloop")
ANSWER_SECONDS_MAX = 5.5
GARBAGE = {
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "noise": bytes(reversed(range(256))),
    "one word": b"+OK\r\n",
    "more answers than calls": b"+OK\r\n" * 1000,
    "a number": b":1000000000000000\r\n",
    "a list": b"*2\r\n$1\r\na\r\n:5\r\n",
    "nothing": b"$-1\r\n",
}


class Garbling:
    """Forwards to Redis. While there is ``garbage``, it answers each piece of a request,
    and stands in place of each piece of an answer: no client waits for more.
    """

    def __init__(self, redis: Server) -> None:
        self._redis = redis
        self._writers = list[asyncio.StreamWriter]()
        self._subscribers = set[asyncio.StreamWriter]()
        self.is_pushed = False
        """Whether garbage stood in place of a message to a subscriber."""
        self.garbage = b""
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Garbling]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        yield self
        server.close()
        for writer in self._writers:
            writer.close()
        await server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, to_redis = await asyncio.open_connection("127.0.0.1", self._redis.port)
        self._writers += writer, to_redis
        await asyncio.gather(self._up(reader, to_redis, writer), self._down(theirs, writer))

    async def _up(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                if b"SUBSCRIBE" in data:
                    self._subscribers.add(back)
                to.write(data)
                back.write(self.garbage)
        to.close()

    async def _down(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                to.write(self.garbage or data)
                self.is_pushed |= bool(self.garbage) and to in self._subscribers
        to.close()


async def survives(garbage: bytes, redis: Server, name: str) -> None:
    heard, reasons = list[Notification](), set[str]()
    async with Garbling(redis).listening() as way:
        registry = RedisRegistry(way.url, prefix=f"{name}:")
        one, two = RedisBus(way.url, "one", name), RedisBus(redis.url, "two", name)
        one.subscribe(heard.append)
        running = [asyncio.create_task(bus.run()) for bus in (one, two)]

        async def published() -> None:
            two.publish(KeysChanged())
            await asyncio.sleep(0.05)

        async def is_heard() -> bool:
            await published()
            return bool(heard)

        async def is_pushed() -> bool:
            await published()
            return way.is_pushed

        async def fails() -> None:
            one.publish(KeysChanged())
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                with pytest.raises(HoldfastError):
                    await registry.gateways_of([ANNA])
            assert registry.trouble is not None, name
            reasons.add(registry.trouble[0])

        await connect(registry, "east", ANNA)
        await until(is_heard)
        way.garbage = garbage
        for _ in range(3):  # then on new connections, whose greeting is garbage too
            await fails()
        assert reasons == {"not_redis"}, (name, reasons)
        await until(is_pushed)
        way.garbage = b""

        async def is_found() -> bool:
            with suppress(HoldfastError):
                return await registry.gateways_of([ANNA]) == {"east": {ANNA}}
            return False

        await until(is_found)
        heard.clear()
        await until(is_heard)
        assert not any(task.done() for task in running), name
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await registry.close()


async def test_registry_and_bus_that_get_garbage_fail_in_time_and_come_back(
    redis_server: Server,
) -> None:
    await asyncio.gather(
        *(survives(garbage, redis_server, name) for name, garbage in GARBAGE.items())
    )
