"""How often a node announces its commits: the less, the more each announces."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from holdfast.store.postgres.notifications import REST_SECONDS_MAX, CommitNotifications


class FakeServer:
    """A server whose one connection notes when it was asked to notify."""

    def __init__(self) -> None:
        self.notified_at: list[float] = []
        self.raw = self

    async def connect(self) -> FakeServer:
        return self

    def get_server_pid(self) -> int:
        return 1

    async def execute(self, _: str) -> None: ...

    async def fetchrow(self, _: str) -> None:
        self.notified_at.append(asyncio.get_running_loop().time())

    def terminate(self) -> None: ...


async def announced(sends: int) -> list[float]:
    """The seconds between notifications while a commit of so many sends ends each ms."""
    server: Any = FakeServer()
    notifications = CommitNotifications(server)
    for _ in range(100):
        notifications.announce(sends)
        await asyncio.sleep(0.001)
    await notifications.close()
    return [after - before for before, after in pairwise(server.notified_at)]


async def test_lone_sends_are_announced_one_by_one() -> None:
    assert len(await announced(1)) >= 98


async def test_busy_node_announces_many_commits_at_once() -> None:
    pauses = await announced(60)
    assert len(pauses) <= 11
    assert max(pauses) < REST_SECONDS_MAX + 0.002, "and soon all the same"


async def test_first_commit_after_a_quiet_moment_is_announced_at_once() -> None:
    server: Any = FakeServer()
    notifications = CommitNotifications(server)
    for _ in range(3):
        notifications.announce(512)
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(1)
        assert server.notified_at[-1] - began < 0.0005
    await notifications.close()
