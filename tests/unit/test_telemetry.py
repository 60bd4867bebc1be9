"""Metrics: events are counted where they happen, gauges follow their values."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import apsw
import pytest
import structlog
from gateway_rig import FakeSocket, bench, settle
from structlog.testing import capture_logs

from holdfast import telemetry
from holdfast.drivers.sqlite.database import Handle, SqliteSettings, open_and_migrate
from holdfast.errors import Unavailable
from holdfast.fanout.dead_letters import DeadLetter, DeadLetterSettings, RecentDeadLetters
from holdfast.gateway.connection import Connection
from holdfast.gateway.settings import GatewaySettings
from holdfast.message import Draft, Outcome
from holdfast.resilience import BreakerSettings, DependencyBreaker
from holdfast.store.memory import MemoryStore
from holdfast.telemetry.dependencies import HEALED_SECONDS, Outages
from holdfast.telemetry.metrics import REGISTRY
from holdfast.webhooks.delivery import FailingEndpoints
from holdfast.wire.close_codes import CloseReason
from proof.virtual_loop import LoopClock

SOURCE = Path(__file__).resolve().parents[2] / "src" / "holdfast"
OTHERS = {"alert.py", "causes.py", "expressions.py", "judge.py", "notices.py"}
CATALOGUE = [
    path.read_text() for path in (SOURCE / "telemetry").glob("*.py") if path.name not in OTHERS
]
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
    makers = ("counter", "gauge", "histogram", "Histogram", "LoopHistogram")
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
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute))
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


FORCED = {
    "slow_consumer",
    "memory_pressure",
    "overloaded",
    "state_diverged",
    "upstream_failure",
    "rate_limited",
}


@pytest.mark.covers("000 forced resync rate < 1 % of connections/hour")
@pytest.mark.parametrize("closing", CloseReason)
async def test_forced_resyncs_are_counted_and_planned_closes_are_not(closing: CloseReason) -> None:
    async with bench() as parts:
        parts.connect("alice")
        await settle()
        [connection] = parts.gateway.open_connections
        before = metric("client_resync_forced_total")
        connection.close(closing)
        counted = metric("client_resync_forced_total") - before
    assert counted == (closing.reason in FORCED)


SPREAD = {"server_shutdown", "memory_pressure", "upstream_failure"}


@pytest.mark.parametrize("closing", CloseReason)
async def test_closes_of_many_clients_tell_each_its_own_delay(closing: CloseReason) -> None:
    async with bench() as parts:
        sockets = [parts.connect("alice", f"device{n}") for n in range(5)]
        for _ in range(495):
            parts.connect(None)
        await settle()
        for socket in sockets:
            socket.connection.close(closing)
        delays = {socket.take()[-1]["payload"]["reconnect_delay_ms"] for socket in sockets}
    if closing.reason in SPREAD:
        assert len(delays) > 1 and 0 <= min(delays) <= max(delays) <= 1_000
    else:
        assert delays == {0}


class BrokenConnection(Connection):
    def flush(self) -> None:
        raise RuntimeError("a defect")


async def test_connection_aborted_after_a_defect_is_a_forced_resync() -> None:
    before = metric("client_resync_forced_total")
    async with bench(connection_type=BrokenConnection) as parts:
        parts.connect("alice")
        await settle()
    assert metric("client_resync_forced_total") - before == 1


@pytest.mark.parametrize(
    ("sign", "counts"),
    [("delivery_skipped", 1), ("acks_stale", 1), ("outbound_buffer_above_warning", 0)],
)
def test_forced_resyncs_of_a_session_are_counted(sign: str, counts: int) -> None:
    before = metric("client_resync_forced_total")
    telemetry.session_noticed(sign)
    assert metric("client_resync_forced_total") - before == counts


def test_failures_that_heal_without_damage_are_logged_as_sev_2() -> None:
    with capture_logs() as logged:
        telemetry.log_lost("fanout", (7,))
    assert [(line["log_level"], line["severity"]) for line in logged] == [("error", "SEV-2")]


@pytest.mark.covers("000 correctness failures: page within 1 min")
@pytest.mark.covers("001 a missing counter is SEV-2")
@pytest.mark.parametrize(
    "event",
    [
        lambda: telemetry.counter_corruption("chat_a"),
        lambda: telemetry.duplicate_sequence("chat_a"),
        lambda: telemetry.store_moved("chats.db"),
        lambda: telemetry.epochs_raised(2),
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
    conflict = telemetry.transaction_conflict
    handle = Handle(path, settings, None, write=True, on_taken=conflict)
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
    times = ["2026-01-01T10:59:00.000Z"] * 3 + ["2026-01-01T11:00:00.000Z"] * 6
    for offset, at in enumerate(times):
        await letters.put(DeadLetter(0, offset, "undecodable", "", b"", at))
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


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("lasts", "heals"), [(HEALED_SECONDS, 1), (HEALED_SECONDS + 1, 0)])
def test_failure_of_a_dependency_is_healed_if_it_ends_within_30_seconds(
    lasts: float, heals: int
) -> None:
    time = Time()
    outages = Outages(time)
    name = f"lasts_{lasts}"
    outages.report(name, up=True)
    for _ in range(3):
        outages.report(name, up=False)
        time.now += lasts / 3
    outages.report(name, up=True)
    outages.report(name, up=True)
    assert metric("dependency_failures_total", dependency=name) == 1
    assert metric("dependency_failures_healed_total", dependency=name) == heals


def answers() -> dict[str, float]:
    """Sends by their answer."""
    [family] = [m for m in REGISTRY.collect() if m.name == "holdfast_ingest_sends"]
    return {s.labels["answer"]: s.value for s in family.samples if s.name.endswith("_total")}


async def test_every_send_that_reaches_the_node_is_counted_once_by_its_answer() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        halted = await parts.chat("alice", "bob")
        assert isinstance(parts.store, MemoryStore)
        parts.store._chats[halted].counter = None
        socket = parts.connect("alice")
        await settle()
        before = answers()

        def send(key: str, chat: str = chat_id, content: str = "hello") -> None:
            socket.say("send_message", client_message_id=key, chat_id=chat, content=content)

        send("a")
        await settle()
        send("a")
        send("b", chat="chat_of_nobody")
        send("c", content="")
        send("d", chat=halted)
        await settle()
        for n in range(40):
            send(f"flood{n}")
        await asyncio.sleep(5)
        parts.intake.stop()
        send("e")
        await settle()
        after = answers()
    assert {name: after[name] - before.get(name, 0) for name in ANSWERS} == ANSWERS


ANSWERS = {"persisted": 1 + 16, "deduplicated": 1, "refused": 2 + 24, "halted": 1, "turned_away": 1}
"""Of a flood of 40, the sends beyond the burst of 20 are refused."""


async def test_send_that_loses_the_race_for_its_key_is_no_conflict() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        socket = parts.connect("alice")
        await settle()

        def send(key: str) -> None:
            socket.say("send_message", client_message_id=key, chat_id=chat_id, content="hello")

        races = metric("durability_key_races_total")
        conflicts = metric("durability_transaction_conflicts_total")
        send("a")
        await settle()
        await asyncio.sleep(1)
        send("a")  # a retry: the first was stored before this came
        await settle()
        assert metric("durability_key_races_total") - races == 0
        send("before")
        send("b")
        send("b")
        await settle()
        assert metric("durability_key_races_total") - races == 1
        assert metric("durability_transaction_conflicts_total") == conflicts


def test_endpoint_is_failing_until_a_delivery_is_accepted_or_it_is_gone() -> None:
    failing = FailingEndpoints()
    failing.on_delivery("ep_1", accepted=False)
    failing.on_delivery("ep_1", accepted=False)
    failing.on_delivery("ep_2", accepted=False)
    assert metric("webhooks_endpoints_failing") == 2
    failing.on_delivery("ep_1", accepted=True)
    assert metric("webhooks_endpoints_failing") == 1
    failing.on_endpoints({"ep_1", "ep_3"})
    assert metric("webhooks_endpoints_failing") == 0


def test_job_that_dies_is_counted_as_a_dead_letter_of_its_reason() -> None:
    before = metric("work_jobs_dead_total", reason="timeout_exceeded")
    telemetry.work_failed("timeout_exceeded", is_dead=False)
    assert metric("work_jobs_dead_total", reason="timeout_exceeded") == before
    telemetry.work_failed("timeout_exceeded", is_dead=True)
    assert metric("work_jobs_dead_total", reason="timeout_exceeded") == before + 1


async def test_connections_are_counted_by_how_long_they_are_open() -> None:
    async with bench() as parts:
        parts.connect("alice"), parts.connect("bob")
        await asyncio.sleep(1)
        before = metric("gateway_connection_hours_total")
        await asyncio.sleep(9)
        assert metric("gateway_connection_hours_total") - before == pytest.approx(18 / 3600)


def test_replies_are_counted_by_their_labels() -> None:
    def counted() -> list[float]:
        return [
            metric("reply_ends_total", surface="chat", end="done"),
            metric("reply_ends_total", surface="native", end="done"),
            metric("reply_admissions_total", layer="queue"),
            metric("reply_provider_attempts_total", provider="p", outcome="ok"),
            metric("reply_tokens_total", kind="prompt"),
            metric("reply_tokens_total", kind="completion"),
            metric("reply_first_token_seconds_sum", since="arrival"),
            metric("reply_first_token_seconds_sum", since="grant"),
        ]

    before = counted()
    for _ in range(2):
        telemetry.reply_ended("chat", "done", 1.0)
        telemetry.reply_admitted("queue")
        telemetry.provider_attempt("p", "ok")
        telemetry.reply_tokens(3, 4)
        telemetry.reply_first_token(5.0, 6.0)
    rises = [after - each for after, each in zip(counted(), before, strict=True)]
    assert rises == pytest.approx([2, 0, 2, 2, 6, 8, 10, 12])


@pytest.mark.parametrize("microseconds", [1_700_000_000_000_000, 1_700_000_000_999_999, 1])
def test_line_has_the_time_of_utc(microseconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, before = StringIO(), structlog.get_config()
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)  # our own lines only
    try:
        telemetry.configure_logging(json=True, stream=lines)
        monkeypatch.setattr("time.time_ns", lambda: microseconds * 1000)
        structlog.get_logger().info("node.ready")
    finally:
        structlog.configure(**before)
    written = json.loads(lines.getvalue())["timestamp"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", written)
    moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=microseconds)
    assert datetime.fromisoformat(written) == moment
