"""Metrics: events are counted where they happen, gauges follow their values."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest
from gateway_rig import FakeSocket, bench, settle
from structlog.testing import capture_logs

from holdfast import telemetry
from holdfast.drivers.sqlite.database import Handle, SqliteSettings, open_and_migrate
from holdfast.errors import Unavailable
from holdfast.fanout.dead_letters import DeadLetter, DeadLetterSettings, RecentDeadLetters
from holdfast.gateway.settings import GatewaySettings
from holdfast.message import Draft, Outcome
from holdfast.resilience import BreakerSettings, DependencyBreaker
from holdfast.store.memory import MemoryStore
from holdfast.telemetry.metrics import REGISTRY
from proof.virtual_loop import LoopClock

SOURCE = Path(__file__).resolve().parents[2] / "src" / "holdfast"
CATALOGUE = [path.read_text() for path in (SOURCE / "telemetry").glob("*.py")]
STATEMENTS = [statement for text in CATALOGUE for statement in ast.parse(text).body]


def metric(name: str, **labels: str) -> float:
    return telemetry.REGISTRY.get_sample_value(f"holdfast_{name}", labels) or 0.0


def test_every_function_of_the_catalogue_is_called_somewhere() -> None:
    """A metric that nothing moves would be a promise that nobody keeps."""
    named = {
        node.name
        for node in STATEMENTS
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    texts = [path.read_text() for path in SOURCE.rglob("*.py") if path.parent.name != "telemetry"]
    within = "".join(CATALOGUE)
    unused = {
        name
        for name in named
        if not any(f"telemetry.{name}" in text for text in texts) and within.count(f"{name}(") < 2
    }
    for_tests = {"on_mark"}
    assert unused - for_tests == set(), "called by nobody"


@pytest.mark.covers("000 every metric is moved by something")
def test_every_metric_is_moved_by_a_function_of_the_catalogue() -> None:
    makers = ("counter", "gauge", "histogram", "Histogram")
    metrics = {
        target.id
        for node in STATEMENTS
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in makers
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    used = {
        name.id
        for node in STATEMENTS
        if isinstance(node, ast.FunctionDef)
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    }
    assert len(metrics) > 40
    assert metrics - used == set()


def test_settings_that_differ_are_shown_by_path_and_never_by_value() -> None:
    telemetry.settings_changed(["server.port", "gateway.connections_per_user"])
    telemetry.settings_changed(["server.port"])
    assert metric("setting_changed", path="server.port") == 1
    assert metric("setting_changed", path="gateway.connections_per_user") == 0


@pytest.mark.covers("000 forced resync rate < 1 % of connections/hour")
@pytest.mark.parametrize(
    ("event", "counts"),
    [
        (lambda: telemetry.connection_closed("slow_consumer"), 1),
        (lambda: telemetry.connection_closed("state_diverged"), 1),
        (lambda: telemetry.connection_closed("memory_pressure"), 1),
        (lambda: telemetry.connection_closed("overloaded"), 1),
        (lambda: telemetry.connection_closed("server_shutdown"), 0),
        (lambda: telemetry.connection_closed("rotation"), 0),
        (lambda: telemetry.session_noticed("delivery_skipped"), 1),
        (lambda: telemetry.session_noticed("acks_stale"), 1),
        (lambda: telemetry.session_noticed("outbound_buffer_above_warning"), 0),
    ],
)
def test_forced_resyncs_are_counted_and_planned_closes_are_not(event: Any, counts: int) -> None:
    before = metric("client_resync_forced_total")
    event()
    assert metric("client_resync_forced_total") - before == counts


@pytest.mark.covers("000 correctness failures: page within 1 min")
@pytest.mark.covers("001 a missing counter is SEV-2")
@pytest.mark.parametrize(
    "event",
    [
        lambda: telemetry.counter_corruption("chat_a"),
        lambda: telemetry.duplicate_sequence("chat_a"),
        lambda: telemetry.store_moved("chats.db"),
        lambda: telemetry.rollback_proven("chat_a", "anna", 1, 7, 3),
    ],
)
def test_damage_to_messages_is_logged_as_critical_and_sev_1(event: Any) -> None:
    with capture_logs() as logged:
        event()
    assert [(line["log_level"], line["severity"]) for line in logged] == [("critical", "SEV-1")]


async def test_a_dependency_that_was_just_opened_is_up_before_its_first_call() -> None:
    DependencyBreaker(
        "some_store", "no", BreakerSettings(), LoopClock(), telemetry.dependency_state
    )
    assert metric("dependency_up", dependency="some_store") == 1


@pytest.mark.covers("000 DynamoDB transaction conflict")
def test_a_commit_that_meets_another_writer_is_a_conflict(tmp_path: Path) -> None:
    settings = SqliteSettings(busy_timeout_seconds=0.01)
    path = tmp_path / "some.db"
    handle = Handle(path, settings, None, write=True)
    handle.adopt(open_and_migrate(path, settings, ["CREATE TABLE t (n INTEGER)"]))
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    before = metric("durability_transaction_conflicts_total")
    with pytest.raises(Unavailable), handle.transaction():
        pytest.fail("two writers at once")
    assert metric("durability_transaction_conflicts_total") - before == 1
    other.close()
    handle.close()


@pytest.mark.covers("000 `fanout.dlq.alert_threshold_per_hour`")
@pytest.mark.real_time
async def test_many_dead_letters_in_an_hour_call_the_operator_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(telemetry, "many_dead_letters", calls.append)

    letters = RecentDeadLetters(DeadLetterSettings(alert_threshold_per_hour=3))
    for at in ["2026-01-01T10:59:00.000Z"] * 3 + ["2026-01-01T11:00:00.000Z"] * 6:
        await letters.put(DeadLetter(0, 1, "undecodable", "", b"", at))
    assert calls == [4]


class AwayStore(MemoryStore):
    async def append(self, group: list[Draft]) -> list[Outcome]:  # type: ignore[override]
        raise Unavailable("no answer")


@pytest.mark.covers("000 contract 3, disconnect due to upstream failure")
@pytest.mark.parametrize(("patience", "closed"), [(60, (4007, "upstream_failure")), (0, None)])
async def test_connections_close_for_an_unavailable_store_only_if_that_is_set(
    patience: float, closed: tuple[int, str] | None
) -> None:
    limits = GatewaySettings(upstream_failure_close_seconds=patience)
    async with bench(limits, store=AwayStore()) as parts:
        chat_id = await parts.chat("alice", "bob")
        socket = parts.connect("alice")
        await settle()
        for n in range(5):
            socket.say("send_message", client_message_id=f"c{n}", chat_id=chat_id, content="hello")
            await settle()
        await stay(socket, 59)
        assert socket.closed is None
        await stay(socket, 3)
        assert socket.closed == closed


async def stay(socket: FakeSocket, seconds: int) -> None:
    """Answer heartbeats for so long."""
    for _ in range(seconds):
        await asyncio.sleep(1)
        for frame in socket.take():
            if frame["type"] == "heartbeat":
                socket.say("heartbeat_ack")


def test_library_logs_to_its_host_process_without_secrets_or_locals() -> None:
    program = """
from holdfast import telemetry
payload = "the text of a message"
try:
    raise ValueError("redis://ann:S3CRET@cache/0 does not answer")
except ValueError as error:
    telemetry.defect("work", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert "event='node.defect_found' part='work'" in done.stderr and "ValueError" in done.stderr
    assert "S3CRET" not in done.stderr and "the text of" not in done.stderr


def test_waiting_jobs_are_shown_by_attempt_and_with_their_times() -> None:
    telemetry.work_schedule({1: 3, 10: 2, 400: 5}, 1000.0, 2000.0)
    assert metric("work_jobs_by_attempt", attempt="1") == 3
    assert metric("work_jobs_by_attempt", attempt="10") == 7, (
        "a job may be tried without end; its label may not grow with it"
    )
    assert (
        metric("work_next_due_timestamp_seconds"),
        metric("work_last_due_timestamp_seconds"),
    ) == (1000, 2000)
    telemetry.work_schedule({}, None, None)
    assert metric("work_jobs_by_attempt", attempt="1") == 0
    assert metric("work_next_due_timestamp_seconds") == 0


@pytest.mark.parametrize("name", ["queue_wait_", "first_token_", "gap_", ""])
def test_times_of_replies_are_distinguished_up_to_ten_minutes(name: str) -> None:
    telemetry.reply_granted(1.0)
    telemetry.reply_first_token(1.0, 1.0)
    telemetry.reply_gap(1.0)
    telemetry.reply_ended("chat", "done", 1.0)
    bucket = f"holdfast_reply_{name}seconds_bucket"
    samples = [s for metric in REGISTRY.collect() for s in metric.samples if s.name == bucket]
    assert {float(sample.labels["le"]) for sample in samples} >= {1.0, 60.0, 600.0}
