"""Redis as it is run in production: a primary, a replica, and sentinels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engines import Server
from engines import redis as redis_engine

PATIENCE_SECONDS = 30.0
SERVICE = "limits"
SECRET = "S3CRET"


class SentinelService:
    """A primary, a replica and three sentinels, all with passwords."""

    def __init__(self, started: list[Server]) -> None:
        auth = {"requirepass": SECRET, "masterauth": SECRET, "repl-diskless-sync-delay": "0"}
        started.append(redis_engine.start(**auth))
        self.primary = started[-1]
        replicated = {"replicaof": f"127.0.0.1 {self.primary.port}", **auth}
        started.append(redis_engine.start(**replicated))
        self.replica = started[-1]
        lines = [
            f"sentinel auth-pass {SERVICE} {SECRET}",
            f"requirepass of-{SECRET}",
            f"sentinel sentinel-pass of-{SECRET}",
        ]
        self.sentinels = []
        for _ in range(3):
            started.append(redis_engine.sentinel(self.primary, SERVICE, 2, *lines))
            self.sentinels.append(started[-1])
        for sentinel in self.sentinels:
            self._wait(
                lambda sentinel=sentinel: self._knows_all(sentinel), "the sentinels know each other"
            )

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://:{SECRET}@{hosts}/{SERVICE}/0?sentinel_password=of-{SECRET}"

    def replicated(self) -> None:
        """Until the replica has what the primary had when this was called."""
        wanted = redis_engine.say(self.primary, "INFO", password=SECRET)["master_repl_offset"]

        def has_it() -> bool:
            info = redis_engine.say(self.replica, "INFO", password=SECRET)
            return bool(info["master_link_status"] == "up" and info["slave_repl_offset"] >= wanted)

        self._wait(has_it, "the replica has caught up")

    def primary_port(self) -> int:
        """As a sentinel knows it."""
        return int(self._ask(self.sentinels[0], "SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def _knows_all(self, sentinel: Server) -> bool:
        known = self._ask(sentinel, "SENTINEL MASTER", SERVICE)
        return bool(known["num-slaves"] == 1 and known["num-other-sentinels"] == 2)

    @staticmethod
    def _ask(sentinel: Server, *words: str) -> Any:
        return redis_engine.say(sentinel, *words, password=f"of-{SECRET}")

    @staticmethod
    def _wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for: {what}"
            time.sleep(0.05)
