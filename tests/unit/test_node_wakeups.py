"""What a node changes wakes the others, and they wake it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.access.revocations.contract import Revocation
from holdfast.clock import SystemClock
from holdfast.fanout.bus.contract import (
    ChatsInDoubt,
    KeysChanged,
    Notification,
    RevocationsChanged,
)
from holdfast.limits.composition import open_limits
from holdfast.node.engines import open_engines
from holdfast.node.node import Node
from holdfast.node.work import NodeWork
from holdfast.settings import Settings


class RecordingBus:
    """``published`` is what the node published; ``receive`` hands it a notification."""

    def __init__(self) -> None:
        self.published: list[Notification] = []

    def publish(self, notification: Notification) -> None:
        self.published.append(notification)

    def subscribe(self, on_notification: Callable[[Notification], None]) -> None:
        self.receive = on_notification

    async def run(self) -> None: ...


@asynccontextmanager
async def node_on(tmp_path: Path) -> AsyncIterator[tuple[Node, RecordingBus]]:
    settings, clock, bus = Settings(), SystemClock(), RecordingBus()
    async with (
        open_engines(settings, tmp_path, clock) as opened,
        open_limits(settings.limits, tmp_path, "node_1", clock=clock) as limits,
    ):
        engines = opened._replace(bus=bus)
        work = NodeWork(
            settings.work,
            "node_1",
            engines.jobs,
            engines.endpoints,
            engines.log,
            engines.chats,
            clock,
        )
        credentials = await engines.credentials.load()
        yield Node(settings, engines, limits, work.parts, credentials, clock), bus


@pytest.mark.real_time
async def test_changed_keys_and_revocations_wake_nodes(tmp_path: Path) -> None:
    async with node_on(tmp_path) as (node, bus):
        await node.keys.issue("tenant", "backend", "now", tenant="acme")
        assert bus.published == [KeysChanged()]
        await node.revocations.add(Revocation("ban", "acme", "alice", "", 0, "now", None))
        assert bus.published[1:] == [RevocationsChanged()]

        bus.receive(KeysChanged())
        assert node.keys._woken.is_set() and not node.revocations._woken.is_set()
        bus.receive(RevocationsChanged())
        assert node.revocations._woken.is_set()


@pytest.mark.real_time
async def test_chats_in_doubt_are_compared_here_and_on_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_on(tmp_path) as (node, bus):
        compared: list[Sequence[str]] = []
        monkeypatch.setattr(node.gateway.roster_sync, "compare_chats", compared.append)
        node._compare_chats(["chat_1"])
        assert bus.published == [ChatsInDoubt(("chat_1",))]
        bus.receive(ChatsInDoubt(("chat_2",)))
        assert compared == [["chat_1"], ("chat_2",)]
        many = [f"chat_{n}" for n in range(101)]
        node._compare_chats(many)
        node._compare_chats([])
        sent = [each.chat_ids for each in bus.published[1:] if isinstance(each, ChatsInDoubt)]
        assert [len(chat_ids) for chat_ids in sent] == [50, 50, 1, 0]
        assert [chat_id for chat_ids in sent for chat_id in chat_ids] == many
