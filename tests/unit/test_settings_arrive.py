"""A setting is where it is obeyed: the parts of a node, put together from settings of
which one is changed.

That each is also read there is the last test's business; what it does when it is read
is each part's own.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import FakeSocket, principal

import holdfast
from holdfast import telemetry
from holdfast.clock import SystemClock
from holdfast.limits.composition import open_limits
from holdfast.node import lifecycle
from holdfast.node.engines import open_engines
from holdfast.node.node import Node
from holdfast.node.work import NodeWork
from holdfast.settings import Settings, load, paths
from holdfast.webhooks.delivery import WebhookSender


def session_of(node: Node) -> Any:
    connection = node.gateway.accept(FakeSocket(), principal("alice"), "phone")
    try:
        return connection.session
    finally:
        connection.connection_lost()


def assembler_of(node: Node) -> Any:
    """What gathers the fragments of a connection, as the entrance makes it."""
    return node._websocket_port()._decide._settings


REACH: dict[str, Callable[[Node], Any]] = {
    "gateway.backpressure.inbound.max_queue_age_seconds": lambda n: (
        session_of(n)._pulls._settings.backpressure.inbound
    ),
    "gateway.backpressure.inbound.max_fragments": assembler_of,
    "gateway.backpressure.inbound.max_invalid_frames": lambda n: session_of(n)._requests._inbound,
    "gateway.backpressure.inbound.invalid_frames_window_seconds": lambda n: (
        session_of(n)._requests._inbound
    ),
    "gateway.backpressure.outbound.ephemeral_threshold_percent": lambda n: (
        session_of(n)._outbound._settings
    ),
    "gateway.backpressure.outbound.max_ephemeral_frames": lambda n: (
        session_of(n)._outbound._settings
    ),
    "gateway.timeouts.behind_before_heads_seconds": lambda n: (
        session_of(n)._lifetime.heartbeat._timeouts
    ),
    "gateway.timeouts.overload_window_seconds": lambda n: session_of(n)._settings.timeouts,
    "gateway.timeouts.overload_requests_min": lambda n: session_of(n)._settings.timeouts,
    "durability.history.resume_page_messages": lambda n: n.history._settings,
    "durability.watermarks.flush_interval_seconds": lambda n: n._watermarks._settings,
    "fanout.ephemeral.typing_seconds": lambda n: n._ephemeral._settings,
    "fanout.ephemeral.typing_per_second": lambda n: n._ephemeral._settings,
    "fanout.ephemeral.typing_burst": lambda n: n._ephemeral._settings,
    "fanout.ephemeral.max_chat_members": lambda n: n._ephemeral._settings,
    "fanout.ephemeral.max_presence_chats": lambda n: n._ephemeral._settings,
    "fanout.ephemeral.max_presences": lambda n: n._ephemeral._settings,
    "fanout.ephemeral.max_last_seen": lambda n: n._ephemeral._settings,
    "fanout.ephemeral.lookup_timeout_seconds": lambda n: n._ephemeral._settings,
    "limits.feed.nudge_seconds": lambda n: n.limits.feed._settings,
    "limits.feed.listen_seconds": lambda n: n.limits.feed._settings,
}
"""Setting -> the part's own settings, in which it stands under its name."""


async def with_node(folder: Path, settings: Settings, look: Callable[[Node], None]) -> None:
    clock = SystemClock()
    async with (
        open_engines(settings, folder, clock) as engines,
        open_limits(settings.limits, folder, "node_1", clock=clock) as limits,
    ):
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
        look(Node(settings, engines, limits, work.parts, credentials, clock))


@pytest.mark.parametrize("path", REACH)
@pytest.mark.real_time
async def test_a_part_obeys_the_setting_it_is_given(path: str, tmp_path: Path) -> None:
    settings = load(None, {}, {path: 37})
    name = path.rpartition(".")[2]
    assert getattr(_group(Settings(), path), name) != 37
    await with_node(tmp_path, settings, lambda node: _holds(REACH[path](node), name))


def _holds(part: Any, name: str) -> None:
    assert getattr(part, name) == 37


def _group(settings: Any, path: str) -> Any:
    for part in path.split(".")[:-1]:
        settings = getattr(settings, part)
    return settings


@pytest.mark.real_time
async def test_a_connection_rotates_when_it_is_set_to(tmp_path: Path) -> None:
    def look(node: Node) -> None:
        now = node.gateway.now()
        assert now < session_of(node)._lifetime._rotates_at < now + 37 * 1.06

    await with_node(tmp_path, load(None, {}, {"gateway.timeouts.rotation_seconds": 37}), look)


@pytest.mark.real_time
async def test_as_many_reads_wait_for_the_store_as_are_set(tmp_path: Path) -> None:
    def look(node: Node) -> None:
        assert node.engines.chats._readers._waiting_max == 37

    await with_node(tmp_path, load(None, {}, {"durability.sqlite.reads_waiting_max": 37}), look)


@pytest.mark.real_time
async def test_so_much_of_an_endpoints_answer_is_read_as_is_set() -> None:
    settings = load(None, {}, {"work.webhooks.answer_bytes_max": 37}).work.webhooks

    async with WebhookSender.opened(None, None, SystemClock(), settings) as deliveries:
        assert deliveries._settings.answer_bytes_max == 37


@pytest.mark.parametrize("format", ["json", "text"])
def test_lines_of_the_log_are_as_they_are_set(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configured: list[Any] = []
    monkeypatch.setattr(telemetry, "configure_logging", lambda *given: configured.append(given))
    monkeypatch.setattr(lifecycle, "open_files_max", lambda: 1_024)
    monkeypatch.setattr(lifecycle.uvloop, "run", lambda serving: serving.close())
    lifecycle.run_node(load(None, {}, {"server.log_format": format}), lambda line: None)
    assert configured == [(format == "json", "info")]


@pytest.mark.real_time
@pytest.mark.parametrize("replica", ["", "postgresql://127.0.0.1:1/replica"])
async def test_rules_are_read_from_the_replica_that_is_set(replica: str, tmp_path: Path) -> None:
    """Neither answers: a node starts, and keeps asking the one that is set."""
    primary = "postgresql://127.0.0.1:1/primary"
    settings = load(None, {}, {"limits.rules_url": primary, "limits.replica_url": replica}).limits

    async with open_limits(settings, tmp_path) as limits:
        assert limits.feed._reader.database.settings.url == (replica or primary)


def _read_by(node: ast.AST) -> set[str]:
    """The attributes that are read under a node; what a group asks of itself when it is
    built does not count.
    """
    if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
        return set()
    own = (
        {node.attr} if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) else set()
    )
    return own.union(*map(_read_by, ast.iter_child_nodes(node)))


def test_every_setting_is_read_somewhere() -> None:
    source = Path(holdfast.__file__).parent
    read = set[str]().union(
        *(_read_by(ast.parse(path.read_text())) for path in source.rglob("*.py"))
    )
    by_name = {path.rpartition(".")[2]: path for path, _ in paths()}
    assert not (unread := sorted(by_name[name] for name in set(by_name) - read)), (
        f"nothing reads {unread}"
    )
