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
from holdfast.clock import SystemClock
from holdfast.errors import BadSetting
from holdfast.message import User
from holdfast.node.lifecycle import running
from holdfast.node.node import Node
from holdfast.settings import ServerSettings, Settings
from holdfast.telemetry.notices import (
    AlertSettings,
    AlertView,
    Notice,
    SinkSettings,
    notice_body,
)
from holdfast.webhooks.alert_sinks import AlertSinks, UndeliveredNotice, run_command
from holdfast.webhooks.signature import verify

AT = "2026-01-01T00:00:00.000Z"
ALERT = AlertView("HoldfastA", "SEV-1", "firing", {}, AT, 1.0, "It is.", "docs/guides/x.md")
BODY = notice_body(Notice([ALERT]), "pager", "node_1", "http://n")


def hook(url: str, **fields: Any) -> SinkSettings:
    return SinkSettings("webhook", "pager", url, **fields)


@asynccontextmanager
async def sinks_of(*sinks: SinkSettings, **settings: float) -> AsyncIterator[AlertSinks]:
    found = AlertSinks(AlertSettings(sinks, **settings), SystemClock())
    async with found.running():
        yield found


def failures() -> float:
    labels = {"kind": "webhook", "outcome": "failed"}
    return telemetry.REGISTRY.get_sample_value("holdfast_alert_notices_total", labels) or 0.0


async def test_notice_to_a_webhook_is_signed_and_has_the_given_number(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    done: list[str] = []
    async with receiving() as receiver:
        sink = hook(receiver.url, secret_file=str(secret))
        async with sinks_of(sink) as sinks:
            sinks.send(sink, "alert_7", [ALERT], BODY, done.append)
            await until(lambda: done)
        ((headers, body),) = receiver.calls
        verify(SECRET, headers, time.time(), body)
        assert headers["webhook-id"] == "alert_7" and json.loads(body) == BODY
        assert headers["user-agent"] == "Holdfast-Alerts/1"
        assert done == [""] and sinks.errors == {"pager": ""}


@pytest.mark.parametrize(
    ("severity", "state", "event", "level"),
    [
        ("SEV-1", "firing", "node.alert_fired", "critical"),
        ("SEV-2", "firing", "node.alert_fired", "error"),
        ("SEV-3", "firing", "node.alert_fired", "warning"),
        ("warning", "firing", "node.alert_fired", "warning"),
        ("SEV-1", "resolved", "node.alert_resolved", "info"),
    ],
)
async def test_log_has_a_line_for_each_alert_as_severe_as_it_is(
    severity: str, state: Any, event: str, level: str
) -> None:
    alert = AlertView("A", severity, state, {"metric": "m"}, AT, 1.0, "It is.", "docs/x.md")
    with capture_logs() as logged:
        async with sinks_of() as sinks:
            assert await sinks.deliver(SinkSettings(), "alert_7", [alert], BODY) == ""
    assert logged == [
        {
            "event": event,
            "log_level": level,
            "alert": "A",
            "severity": severity,
            "detail": "It is.",
            "runbook": "docs/x.md",
            "since": AT,
            "metric": "m",
        }
    ]


async def test_defect_in_a_delivery_is_counted_and_the_sink_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(*_: Any) -> None:
        raise ValueError("oh")

    def defects() -> float:
        labels = {"part": "alerts"}
        return telemetry.REGISTRY.get_sample_value("holdfast_defects_total", labels) or 0.0

    done: list[str] = []
    before = defects()
    async with sinks_of() as sinks:
        monkeypatch.setattr(sinks, "_call", fails)
        sinks.send(SinkSettings(), "alert_7", [ALERT], BODY, done.append)
        await until(lambda: done)
    assert done == ["ValueError: oh"] and defects() == before + 1


async def test_delivery_that_a_stop_interrupts_was_not_taken() -> None:
    done: list[str] = []
    async with receiving() as receiver:
        receiver.seconds = 60.0
        sink = hook(receiver.url)
        async with sinks_of(sink) as sinks:
            sinks.send(sink, "alert_7", [ALERT], BODY, done.append)
            await until(lambda: receiver.calls)
        assert done == []


async def hang(receiver: Receiver) -> None:
    receiver.seconds = 60.0


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
    done: list[str] = []
    async with receiving() as receiver:
        await badly(receiver)
        before, sink = failures(), hook(receiver.url)
        with capture_logs() as logged:
            async with sinks_of(sink, webhook_seconds=0.3) as sinks:
                sinks.send(sink, "alert_7", [ALERT], BODY, done.append)
                await until(lambda: done)
        assert re.search(said, sinks.errors["pager"]) and done == [sinks.errors["pager"]]
        assert failures() == before + 1
        (line,) = [each for each in logged if each["event"] == "webhooks.alert_undelivered"]
        assert line["alerts"] == "HoldfastA firing" and line["sink"] == "pager"


async def test_sink_that_hangs_delays_no_other(tmp_path: Path) -> None:
    out = tmp_path / "got"
    hung: list[str] = []
    done: list[str] = []
    async with receiving() as receiver:
        await hang(receiver)
        slow = hook(receiver.url)
        command = SinkSettings("command", argv=("sh", "-c", f"cat >> {out}"))
        async with sinks_of(slow, command, webhook_seconds=20.0) as sinks:
            sinks.send(slow, "alert_1", [ALERT], BODY, hung.append)
            sinks.send(command, "alert_2", [ALERT], BODY, done.append)
            await until(lambda: done)
            assert not hung
        assert json.loads(out.read_text()) == BODY


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


@pytest.mark.real_time("uvloop")
@pytest.mark.parametrize("code", [0, 3])
async def test_command_that_has_ended_before_it_is_written_to_ends_as_it_did(code: int) -> None:
    """The pipes of the server's loop say so in another way. Of commands that start side
    by side, nearly every one has ended by then.
    """
    command = ("sh", "-c", f"exec <&-; exit {code}")
    runs = (run_command(command, b"{}", 20) for _ in range(10))
    for error in await asyncio.gather(*runs, return_exceptions=True):
        assert str(error) == (f"sh ended with {code}" if code else "None")


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [("whsec_short", 0o600, "24 bytes"), ("!", 0o600, "24 bytes"), (SECRET, 0o644, "chmod")],
)
def test_secret_of_no_use_stops_the_start(tmp_path: Path, text: str, mode: int, said: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(BadSetting, match=rf"alerts\.sinks\[0\]\.secret_file: .*{said}"):
        AlertSinks(AlertSettings((hook("http://x/", secret_file=str(file)),)), SystemClock())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("/no/such/page", "/no/such/page does not exist"),
        ("no-such-page", "no-such-page is not in the PATH"),
        ("{folder}", "is a directory"),
        ("{folder}/file", "cannot be run by the server: `chmod \\+x` it"),
    ],
)
def test_command_that_cannot_be_run_stops_the_start(tmp_path: Path, argv: str, said: str) -> None:
    (tmp_path / "file").touch(mode=0o600)
    sink = SinkSettings("command", argv=(argv.format(folder=tmp_path),))
    with pytest.raises(BadSetting, match=rf"alerts\.sinks\[1\]\.argv: .*{said}"):
        AlertSinks(AlertSettings((SinkSettings(), sink)), SystemClock())


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
            alerts=AlertSettings((hook(receiver.url),), group_seconds=0.1),
        )
        async with running(settings, gauges_seconds=0.1) as node:
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


def _drop_counter(file: Path) -> None:
    """As a disk that loses a write, or somebody's tool."""
    connection = apsw.Connection(str(file))
    connection.execute("DROP TRIGGER counters_are_never_deleted")
    connection.execute("DELETE FROM counters")
    connection.close()
