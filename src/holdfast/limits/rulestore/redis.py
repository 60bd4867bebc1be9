"""Notifications over the Redis channel ``rule_changes``: subscribe and publish.

A network that drops everything is noticed: a quiet subscription is pinged. PUBLISH to a
replica succeeds with 0 receivers, so the number of receivers proves nothing and is
ignored.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from holdfast import telemetry
from holdfast.drivers.redis import connection_pool, trouble_of
from holdfast.errors import Unavailable
from holdfast.limits.counters.contract import CountersTrouble
from holdfast.limits.rulestore.contract import CHANNEL, ChangeNotification
from holdfast.limits.rulestore.notifications import LISTENING
from holdfast.limits.rulestore.serialization import decode_notification


class RedisNotifications:
    """``contract.ChangeNotifications`` by SUBSCRIBE, and ``publish``."""

    def __init__(
        self,
        url: str,
        channel: str = CHANNEL,
        connect_timeout_seconds: float = 2.0,
        quiet_seconds: float = 5.0,
    ) -> None:
        self._channel = channel
        self._quiet_seconds = quiet_seconds
        self._redis: Redis = Redis.from_pool(
            connection_pool(url, socket_connect_timeout=connect_timeout_seconds)
        )
        self._publishing, self._listening = _Way(url, "publish"), _Way(url, "subscribe")

    @property
    def trouble(self) -> CountersTrouble | None:
        """Why this Redis does not bring or publish changes; None if it does."""
        return self._listening.trouble or self._publishing.trouble

    async def publish(self, payload: str) -> None:
        try:
            await self._redis.publish(self._channel, payload)
        except (RedisError, OSError) as error:
            self._publishing.failed(error)
            raise Unavailable("Redis does not publish notifications of rule changes") from error
        self._publishing.works()

    async def notifications(self) -> AsyncIterator[ChangeNotification]:
        subscription = self._redis.pubsub()
        try:
            await subscription.subscribe(self._channel)
            asked = False
            while True:
                message = await subscription.get_message(timeout=self._quiet_seconds)
                if message is None:
                    if asked:
                        raise TimeoutError("no answer to a ping")
                    await subscription.ping()
                asked = message is None
                if message is None:
                    continue
                if message["type"] == "subscribe":
                    self._listening.works()
                    yield LISTENING
                elif message["type"] == "message":
                    yield decode_notification(message["data"])
        except (RedisError, OSError) as error:
            self._listening.failed(error)
            raise Unavailable("Redis does not deliver notifications of rule changes") from error
        finally:
            await _close(subscription)

    async def aclose(self) -> None:
        await _close(self._redis)


class _Way:
    """Whether one of the two commands works. Each change of state is logged once."""

    def __init__(self, url: str, command: str) -> None:
        self._url = url
        self._command = command
        self.trouble: CountersTrouble | None = None

    def failed(self, error: Exception) -> None:
        before, self.trouble = self.trouble, CountersTrouble(*trouble_of(error, self._url))
        telemetry.redis_failed("notifications", self.trouble.reason)
        if before is None or before.reason != self.trouble.reason:
            facts = self.trouble._asdict()
            telemetry.log.warning(
                "limits.notifications_unavailable", command=self._command, **facts
            )

    def works(self) -> None:
        if self.trouble is not None:
            self.trouble = None
            telemetry.log.info("limits.notifications_available", command=self._command)


async def _close(what: PubSub | Redis) -> None:
    """Ignore errors: a failed close has closed too. They would hide a cancellation."""
    with suppress(RedisError, OSError):
        await what.aclose()
