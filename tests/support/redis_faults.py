"""A real Redis that is flushed, stopped, full, killed, or killed and put back as it was
earlier.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any, Literal

import redis.asyncio

from engines import Server
from engines import redis as redis_engine
from engines.fixtures import had

RedisFault = Literal["flush", "stop", "kill", "old RDB", "full", "garbage"]
FULL_BYTES = "1"


class FaultyRedis:
    """Its process may end; its folder and its port stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.server: Server = had("redis", lambda: redis_engine.start(dir=str(folder)))

    async def begin(self, fault: RedisFault) -> None:
        if fault == "flush":
            await self.say("FLUSHALL")
        elif fault == "stop":
            os.kill(self.server.pid, signal.SIGSTOP)
        elif fault == "full":
            await self.say("CONFIG", "SET", "maxmemory", FULL_BYTES)
        elif fault == "garbage":
            await self._publish_garbage()
        else:
            self.server.process.kill()
            self.server.process.wait()

    async def end(self, fault: RedisFault) -> None:
        if fault == "stop":
            os.kill(self.server.pid, signal.SIGCONT)
        elif fault == "full":
            await self.say("CONFIG", "SET", "maxmemory", "0")
        elif fault in ("kill", "old RDB"):
            await asyncio.to_thread(self._start_again)

    def _start_again(self) -> None:
        before, self.server = (
            self.server,
            redis_engine.start(self.server.port, dir=str(self._folder)),
        )
        before.stop()
        (self._folder / "dump.rdb").unlink(missing_ok=True)

    async def save(self) -> None:
        """What "old RDB" puts back."""
        await self.say("SAVE")

    async def say(self, *words: str | bytes) -> Any:
        client = redis.asyncio.Redis.from_url(self.server.url)
        answer = await client.execute_command(*words)
        await client.aclose()
        return answer

    async def _publish_garbage(self) -> None:
        """On every channel that somebody listens to."""
        rng = random.Random(len(await self.say("INFO")))
        for channel in await self.say("PUBSUB", "CHANNELS"):
            for size in (0, 1, 7, 100, 10_000, 200_000):
                await self.say("PUBLISH", channel, rng.randbytes(size))
            await self.say("PUBLISH", channel, b"[]")
            await self.say("PUBLISH", channel, b'{"type":"presence"}')
