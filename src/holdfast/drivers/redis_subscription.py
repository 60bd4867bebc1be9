"""The messages of one Redis channel, by SUBSCRIBE: each at most once.

A network that drops everything is noticed: a quiet subscription is pinged. After any
failure it subscribes again; what was published meanwhile is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from holdfast import telemetry
from holdfast.drivers.redis import connection_pool

CONNECT_SECONDS = 2.0
QUIET_SECONDS = 5.0
"""A subscription without messages for this time is pinged; if that is not answered
either, it is opened again.
"""
AGAIN_SECONDS = 1.0


class ChannelSubscription:
    """Calls ``on_message`` from its start, in a running loop, until ``close``.

    ``part`` is whose defect an error of ``on_message`` is.
    """

    def __init__(
        self,
        url: str,
        channel: str,
        on_message: Callable[[bytes], None],
        on_trouble: Callable[[Exception], None],
        part: str,
    ) -> None:
        self._url = url
        self._channel = channel
        self._on_message = on_message
        self._on_trouble = on_trouble
        self._part = part
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        while not self._task.done():  # a Redis client may lose a cancellation
            self._task.cancel()
            await asyncio.wait([self._task], timeout=1.0)

    async def _run(self) -> None:
        while True:
            pool = connection_pool(self._url, socket_connect_timeout=CONNECT_SECONDS)
            redis: Redis = Redis.from_pool(pool)
            try:
                await self._receive(redis)
            except (RedisError, OSError) as error:
                self._on_trouble(error)
            except Exception as error:  # of what a message calls
                telemetry.defect(self._part, error)
            finally:
                with suppress(RedisError, OSError):
                    await redis.aclose()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _receive(self, redis: Redis) -> None:
        async with redis.pubsub() as subscription:
            await subscription.subscribe(self._channel)
            is_pinged = False
            while True:
                message = await subscription.get_message(timeout=QUIET_SECONDS)
                if message is None:
                    if is_pinged:
                        raise TimeoutError("no answer to a ping")
                    await subscription.ping()
                elif message["type"] == "message":
                    self._on_message(message["data"])
                is_pinged = message is None
