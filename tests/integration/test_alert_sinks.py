"""Notices of alerts on their way: real receivers, real programs, and a whole node that
loses a counter.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import httpx
import pytest
from aiohttp import web
from credentials import admin_key_of
from structlog.testing import capture_logs
from typer.testing import CliRunner
from webhook_rig import SECRET, Receiver, receiving, until

from engines import free_port
from holdfast import telemetry
from holdfast.access.principal import USER_SCOPES
from holdfast.cli.app import app
from holdfast.clock import Ids, SystemClock
from holdfast.errors import BadSetting, Unavailable
from holdfast.message import User
from holdfast.node.lifecycle import running
from holdfast.node.node import Node
from holdfast.settings import ServerSettings, Settings
from holdfast.telemetry.notices import AlertSettings, AlertView, SinkSettings, notice_body
from holdfast.webhooks.alert_sinks import (
    JOB_TYPE,
    QUEUED_MAX,
    AlertSinks,
    UndeliveredNotice,
    read_secret,
    run_command,
    with_alerts,
)
from holdfast.webhooks.signature import verify
from holdfast.work.handlers import Handlers
from holdfast.work.job import Policies
from holdfast.work.sqlite.store import MemoryWork
from holdfast.work.worker import Worker, WorkerSettings

AT = "2026-01-01T00:00:00.000Z"
ALERT = AlertView("HoldfastA", "SEV-1", "firing", {}, AT, 1.0, "It is.", "docs/guides/x.md")
BODY = notice_body([ALERT], "pager", "node_1", "http://n", AT)


def hook(url: str, **fields: Any) -> SinkSettings:
    return SinkSettings("webhook", "pager", url, **fields)


@asynccontextmanager
async def sinks_of(
    *sinks: SinkSettings, jobs: Any = None, up: bool = True, **settings: float
) -> AsyncIterator[AlertSinks]:
    """Sinks with a worker that runs their jobs."""
    clock = SystemClock()
    store = jobs or MemoryWork(clock)
    chosen = AlertSettings(sinks, **settings)
    found = AlertSinks(chosen, store, lambda: up, clock, Ids(clock))
    handlers = Handlers()
    found.register(handlers)
    policies = with_alerts(Policies()).with_type(JOB_TYPE, base_seconds=0.02, cap_seconds=0.05)
    quick = WorkerSettings(concurrency=2, poll_max_seconds=0.02)
    worker = Worker(
        MemoryWork(clock) if jobs else store, handlers, settings=quick, policies=policies
    )
    async with found.running(), worker.running():
        yield found


def failures() -> float:
    labels = {"kind": "webhook", "outcome": "failed"}
    return telemetry.REGISTRY.get_sample_value("holdfast_alert_notices_total", labels) or 0.0


async def test_notice_is_a_job_that_is_tried_again_and_signed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    async with receiving() as receiver:
        receiver.answer = lambda calls: web.Response(status=500 if calls <= 2 else 200)
        sink = hook(receiver.url, secret_file=str(secret))
        async with sinks_of(sink) as sinks:
            sinks.put(sink, [ALERT], BODY)
            await until(lambda: len(receiver.calls) == 3)
            await until(lambda: not sinks.status[0].error)
        for headers, body in receiver.calls:
            verify(SECRET, headers, time.time(), body)
        assert len({headers["webhook-id"] for headers, _ in receiver.calls}) == 1
        assert json.loads(receiver.calls[0][1]) == BODY


class NoJobs:
    """A job store that takes nothing."""

    async def enqueue(self, drafts: Any, marks: Any = ()) -> list[int]:
        raise Unavailable("the job store is down")


@pytest.mark.parametrize("up", [True, False])
async def test_notice_is_posted_directly_while_the_job_store_fails(up: bool) -> None:
    async with receiving() as receiver:
        sink = hook(receiver.url)
        async with sinks_of(sink, jobs=NoJobs(), up=up) as sinks:
            sinks.put(sink, [ALERT], BODY)
            await until(lambda: sinks.status[0].last)
        assert len(receiver.calls) == 1 and not sinks.status[0].error


async def hang(receiver: Receiver) -> None:
    receiver.seconds = 1.5


async def redirect(receiver: Receiver) -> None:
    receiver.answer = lambda _: web.Response(status=302, headers={"location": receiver.url})


async def fail(receiver: Receiver) -> None:
    receiver.answer = lambda _: web.Response(status=500, text="oh")


async def refuse(receiver: Receiver) -> None:
    receiver.url = f"http://127.0.0.1:{free_port()}/"


@pytest.mark.parametrize(
    ("badly", "said"),
    [
        (hang, "no answer within 0.3 s"),
        (redirect, r"it answered 302 \(redirects are not followed\)"),
        (fail, "it answered 500: oh"),
        (refuse, "Cannot connect"),
    ],
)
async def test_sink_that_takes_nothing_is_counted_and_named(badly: Any, said: str) -> None:
    async with receiving() as receiver:
        await badly(receiver)
        before, sink = failures(), hook(receiver.url)
        with capture_logs() as logged:
            async with sinks_of(sink, jobs=NoJobs(), webhook_seconds=0.3) as sinks:
                sinks.put(sink, [ALERT], BODY)
                await until(lambda: sinks.status[0].error)
        assert re.search(said, sinks.status[0].error)
        assert failures() == before + 1
        (line,) = [each for each in logged if each["event"] == "webhooks.alert_undelivered"]
        assert line["alerts"] == "HoldfastA firing" and line["sink"] == "pager"


async def test_sink_that_hangs_keeps_a_bounded_queue_and_delays_no_other(tmp_path: Path) -> None:
    out = tmp_path / "got"
    async with receiving() as receiver:
        await hang(receiver)
        slow = hook(receiver.url)
        command = SinkSettings("command", argv=("sh", "-c", f"cat >> {out}; echo >> {out}"))
        with capture_logs() as logged:
            async with sinks_of(slow, command, jobs=NoJobs(), webhook_seconds=20.0) as sinks:
                for _ in range(QUEUED_MAX + 2):
                    sinks.put(slow, [ALERT], BODY)
                    await asyncio.sleep(0)
                sinks.put(command, [ALERT], BODY)
                await until(lambda: sinks.status[1].last)
        assert json.loads(out.read_text()) == BODY
        dropped = [each for each in logged if each["event"] == "webhooks.alert_undelivered"]
        assert len(dropped) == 1 and "wait for it" in dropped[0]["error"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("sleep", "60"), "ran longer than 0.3 s"),
        (("sh", "-c", "sleep 60 & sleep 60"), "ran longer than 0.3 s"),
        (("sh", "-c", "echo no >&2; exit 3"), "ended with 3: no"),
        (("/no/such/program",), "cannot be started"),
    ],
)
async def test_command_is_bounded_and_its_failure_says_why(
    argv: tuple[str, ...], said: str
) -> None:
    started = time.monotonic()
    with pytest.raises(UndeliveredNotice, match=said):
        await run_command(argv, b"{}", 0.3)
    assert time.monotonic() - started < 5


async def test_command_that_does_not_read_its_input_is_content() -> None:
    await run_command((sys.executable, "-c", "pass"), b"x" * 1_000_000, 20)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [("whsec_short", 0o600, "24 bytes"), ("!", 0o600, "24 bytes"), (SECRET, 0o644, "chmod")],
)
def test_secret_of_no_use_stops_the_start(tmp_path: Path, text: str, mode: int, said: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(BadSetting, match=said):
        read_secret(hook("http://x/", secret_file=str(file)))


def names(receiver: Receiver, status: str) -> set[str]:
    return {
        alert["labels"]["alertname"]
        for _, body in receiver.calls
        for alert in json.loads(body)["alerts"]
        if alert["status"] == status
    }


@pytest.mark.covers("000 2.3 counter corruption: page on-call")
@pytest.mark.covers("000 correctness failures: page within 1 min")
async def test_dropped_counter_is_at_a_webhook_within_a_minute(tmp_path: Path) -> None:
    """And in the first line of the status; it clears when the chat is recovered."""
    async with receiving() as receiver:
        settings = Settings(
            ServerSettings(port=0, state_dir=str(tmp_path / "state")),
            alerts=AlertSettings((hook(receiver.url),), group_seconds=1.0),
        )
        async with running(settings, gauges_seconds=0.5) as node:
            token = node.tokens.mint(User("default", "ann"), 600, USER_SCOPES)
            async with httpx.AsyncClient(
                base_url=node.url, headers={"authorization": f"Bearer {token}"}
            ) as ann:
                made = await ann.post("/v1/chats", json={"name": "lobby", "members": []})
                chat_id = made.json()["chat"]["chat_id"]
                await asyncio.to_thread(_drop_counter, tmp_path / "state" / "chats.db")
                started = time.monotonic()
                refused = await ann.post(
                    f"/v1/chats/{chat_id}/messages",
                    json={"content": "hello"},
                    headers={"idempotency-key": "k1"},
                )
            assert refused.json()["error"]["code"] == "CHAT_HALTED", refused.text
            await until(lambda: "HoldfastCounterCorruption" in names(receiver, "firing"))
            assert time.monotonic() - started < 60
            status = await said(node, "status")
            assert status.startswith("SEV-1 HoldfastCounterCorruption: "), status
            assert "docs/guides/runbooks/counter-corruption.md" in status.splitlines()[0]
            assert chat_id in await said(node, "chat", "ls", "--halted")
            await until(lambda: "HoldfastChatsHalted" in names(receiver, "firing"))
            await said(node, "chat", "recover", chat_id, "--reason", "it was dropped")
            await until(lambda: "HoldfastChatsHalted" in names(receiver, "resolved"))


async def said(node: Node, *words: str) -> str:
    """What a command of an operator prints."""
    environment = {"HOLDFAST_URL": node.url, "HOLDFAST_TOKEN": admin_key_of(node)}
    done = await asyncio.to_thread(CliRunner().invoke, app, list(words), env=environment)
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stdout.splitlines() if not line[:4].isdigit()]  # of the log
    return "\n".join(lines)


async def test_notice_survives_a_restart_of_the_node(tmp_path: Path) -> None:
    """Nobody listens when the alert fires; the next process delivers it."""
    port = free_port()
    settings = Settings(
        ServerSettings(port=0, state_dir=str(tmp_path / "state")),
        alerts=AlertSettings((hook(f"http://127.0.0.1:{port}/hook"),)),
    )
    async with running(settings, gauges_seconds=0.2) as node:
        await until(lambda: telemetry.samples(["alerts_firing"])["alerts_firing"])
        telemetry.duplicate_sequence("chat_x")

        async def undelivered() -> bool:
            shown = json.loads(await said(node, "alerts", "ls", "--json"))
            return bool(shown["sinks"][0]["error"])

        await until(undelivered)
    async with receiving(port) as receiver, running(settings, gauges_seconds=0.2):
        await until(lambda: "HoldfastDuplicateSequence" in names(receiver, "firing"))


def _drop_counter(file: Path) -> None:
    """As a disk that loses a write, or somebody's tool."""
    connection = apsw.Connection(str(file))
    connection.execute("DROP TRIGGER counters_are_never_deleted")
    connection.execute("DELETE FROM counters")
    connection.close()
