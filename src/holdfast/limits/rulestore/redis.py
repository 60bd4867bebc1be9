"""The Redis channel ``rule_changes`` as a doorbell, and the publishing side of it.

A network that swallows everything is noticed: a doorbell that has been quiet is asked whether it is still there.
PUBLISH to a replica succeeds with 0 receivers, so a count of receivers proves nothing and is not looked at.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from holdfast.errors import Unavailable
from holdfast.limits.rulestore.bell import LISTENING
from holdfast.limits.rulestore.contract import CHANNEL, Ring
from holdfast.limits.rulestore.reading import heard_ring


class RedisBell:
    """``contract.Doorbell`` by SUBSCRIBE, and ``publish`` for whoever follows the log."""

    def __init__(
        self, url: str, channel: str = CHANNEL, connect_timeout_seconds: float = 2.0, quiet_seconds: float = 5.0
    ) -> None:
        self._channel = channel
        self._quiet_seconds = quiet_seconds
        self._redis: Redis = Redis.from_url(
            url, socket_connect_timeout=connect_timeout_seconds, retry=Retry(NoBackoff(), 0)
        )

    async def publish(self, payload: str) -> None:
        try:
            await self._redis.publish(self._channel, payload)
        except (RedisError, OSError) as error:
            raise Unavailable("the doorbell cannot be rung") from error

    async def rings(self) -> AsyncIterator[Ring]:
        subscription = self._redis.pubsub()
        try:
            await subscription.subscribe(self._channel)
            asked = False
            while True:
                message = await subscription.get_message(timeout=self._quiet_seconds)
                if message is None:
                    if asked:
                        raise Unavailable("the doorbell does not answer")
                    await subscription.ping()
                asked = message is None
                if message is None:
                    continue
                if message["type"] == "subscribe":
                    yield LISTENING
                elif message["type"] == "message":
                    yield heard_ring(message["data"])
        except (RedisError, OSError) as error:
            raise Unavailable("the doorbell cannot be heard") from error
        finally:
            await _close(subscription)

    async def aclose(self) -> None:
        await _close(self._redis)


async def _close(what: PubSub | Redis) -> None:
    """A closing that fails has closed, too; its error would take the place of the cancellation that led here."""
    with suppress(RedisError, OSError):
        await what.aclose()
