"""A real Redis with every kind of trouble: limiting goes on, and the reason is reported
once, without a secret.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from program import ROOT
from structlog.testing import capture_logs
from tls import certificate

from engines import Server, free_port
from engines import redis as redis_engine
from engines.fixtures import had
from holdfast.cli.operations import alarms
from holdfast.drivers.redis import REASONS
from holdfast.limits.composition import LimitsParts, LimitsSettings, LimitsTuning, open_limits
from holdfast.limits.limiter.batch import BatchSettings
from holdfast.limits.limiter.settings import LimiterSettings
from holdfast.limits.rules import Check, Rule
from holdfast.limits.rulestore.redis import RedisNotifications
from holdfast.resilience import BreakerSettings
from holdfast.telemetry import REGISTRY

SEARCH = Rule("acme", "/api/search", "fixed_window", 1_000_000, 366 * 86_400.0)
QUICK = LimiterSettings(
    heartbeat_seconds=0.05,
    node_ttl_seconds=5.0,
    batch=BatchSettings(
        breaker=BreakerSettings(3, failure_window_seconds=1.0, open_duration_seconds=0.1)
    ),
)
PATIENCE_SECONDS = 30.0
POLICY = "CONFIG SET maxmemory-policy"
RIGHT, WRONG = "r1ght-S3CRET", "wr0ng-S3CRET"


class Wrong:
    """One Redis with a password, TLS and a user who may do nothing; ``say`` is an
    operator at its prompt.
    """

    def __init__(self, folder: Path) -> None:
        cert, key = certificate(folder)
        self.tls_port = free_port()
        tls = {"tls-port": str(self.tls_port), "tls-cert-file": str(cert), "tls-key-file": str(key)}
        self.server: Server = redis_engine.start(**tls, **{"tls-auth-clients": "no"})
        self._operator = redis.Redis(port=self.server.port)
        self.say("ACL SETUSER limited on >" + RIGHT + " ~* +@connection +info")
        self.say("ACL SETUSER deaf on >" + RIGHT + " ~* resetchannels +@all")
        self.say("ACL SETUSER keeper on >" + RIGHT + " ~* &* +@all")

    def say(self, words: str) -> None:
        self._operator.execute_command(*words.split(" "))

    def url(self, user: str = "keeper", password: str = RIGHT) -> str:
        return f"redis://{user}:{password}@127.0.0.1:{self.server.port}/0"


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wrong]:
    made = had("redis", lambda: Wrong(tmp_path_factory.mktemp("redis")))
    yield made
    made.server.stop()


TUNING = LimitsTuning(health_window_seconds=0.5)


def opened(
    url: str, state: Path, tuning: LimitsTuning = TUNING
) -> AbstractAsyncContextManager[LimitsParts]:
    chosen = LimitsSettings(url, limiter=QUICK)
    return open_limits(chosen, state, starts_with=[SEARCH], tuning=tuning)


def counted(use: str, reason: str) -> float:
    labels = {"use": use, "reason": reason}
    return REGISTRY.get_sample_value("holdfast_limits_redis_errors_total", labels) or 0.0


async def until(limits: LimitsParts, condition: Callable[[], bool], what: str) -> None:
    """Ask until it holds: whatever becomes of Redis, every check is answered."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < PATIENCE_SECONDS, (
            f"waited in vain for: {what}; {limits.status()}"
        )
        assert (await limits.limiter.check("acme", "/api/search", "ann")).allowed
        await asyncio.sleep(0.01)


def said(lines: list[MutableMapping[str, Any]], event: str) -> list[Any]:
    return [line.get("reason") for line in lines if line["event"] == event]


async def judge(
    limits_opened: AbstractAsyncContextManager[LimitsParts],
    reason: str,
    begin: Callable[[], None] | None = None,
    end: Callable[[], None] | None = None,
) -> None:
    """Open limits on a Redis in trouble, or let it begin; with ``end``, it ends."""
    before = counted("counters", reason)
    with capture_logs() as lines:
        async with asyncio.timeout(2 * PATIENCE_SECONDS), limits_opened as limits:
            if begin is not None:
                await until(
                    limits, lambda: limits.status()["counters"] == "up", "it works at first"
                )
                begin()
            await until(limits, lambda: limits.status()["counters_reason"] == reason, reason)
            status = limits.status()
            assert status["counters"] in ("down", "degraded") and status["degraded_ratio"] > 0.1
            assert limits.dependencies()["counters"] != "up"
            assert (await limits.health())["rate_limiting"] == "degraded"
            (alarm,) = [line for line in alarms({"limits": status}) if "counters are" in line]
            assert reason in alarm and "limits-redis.md" in alarm and "S3CRET" not in alarm
            await until(limits, lambda: counted("counters", reason) > before, "counted by reason")
            if end is not None:
                end()
                await until(limits, lambda: limits.status()["counters"] == "up", "up again")
                assert limits.status()["counters_reason"] == ""
    assert said(lines, "limits.counters_unavailable").count(reason) == 1, lines
    assert len(said(lines, "limits.counters_available")) == (end is not None), lines
    assert "S3CRET" not in repr(lines)


async def test_wrong_password_is_reported(wrong: Wrong, tmp_path: Path) -> None:
    await judge(opened(wrong.url(password=WRONG), tmp_path), "auth")


async def test_user_without_script_rights_is_reported(wrong: Wrong, tmp_path: Path) -> None:
    await judge(opened(wrong.url("limited"), tmp_path), "permission")


async def test_untrusted_certificate_is_reported(wrong: Wrong, tmp_path: Path) -> None:
    url = f"rediss://keeper:{RIGHT}@127.0.0.1:{wrong.tls_port}/0"
    await judge(opened(url, tmp_path), "tls")


async def test_unreachable_redis_is_reported(tmp_path: Path) -> None:
    url = f"redis://keeper:{RIGHT}@127.0.0.1:{free_port()}/0"
    await judge(opened(url, tmp_path), "unreachable")


async def test_server_that_is_not_redis_is_reported(tmp_path: Path) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await judge(opened(f"redis://127.0.0.1:{port}/0", tmp_path), "not_redis")


@pytest.mark.parametrize(
    ("reason", "begin", "end"),
    [
        ("full", "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        ("read_only", "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
        ("wrong_type", "SET rl:nodes x", "DEL rl:nodes"),
        ("eviction", f"{POLICY} allkeys-lru maxmemory 1gb", f"{POLICY} noeviction maxmemory 0"),
    ],
)
async def test_redis_that_refuses_is_reported_until_repaired(
    wrong: Wrong, tmp_path: Path, reason: str, begin: str, end: str
) -> None:
    tuning = replace(TUNING, redis_check_seconds=0.2)

    def broken() -> None:
        if reason == "wrong_type":
            wrong.say("DEL rl:nodes")
        wrong.say(begin)

    try:
        limits = opened(wrong.url(), tmp_path, tuning)
        await judge(limits, reason, broken, lambda: wrong.say(end))
    finally:
        with suppress(redis.RedisError):
            wrong.say(end)


async def test_hanging_redis_is_reported_until_it_answers(wrong: Wrong, tmp_path: Path) -> None:
    def signalled(number: signal.Signals) -> Callable[[], None]:
        return lambda: os.kill(wrong.server.pid, number)

    limits = opened(wrong.url(), tmp_path)
    try:
        await judge(limits, "timeout", signalled(signal.SIGSTOP), signalled(signal.SIGCONT))
    finally:
        os.kill(wrong.server.pid, signal.SIGCONT)


async def test_checks_stay_quick_while_redis_hangs_and_are_counted_after(
    wrong: Wrong, tmp_path: Path
) -> None:
    """With batches and a breaker, only the first checks wait for the deadline."""

    async def asked(limits: LimitsParts, seconds: float) -> tuple[list[float], str]:
        spent, until, by = [], time.monotonic() + seconds, ""
        while (start := time.monotonic()) < until:
            by = (await limits.limiter.check("acme", "/api/search", "ann")).decided_by
            spent.append(time.monotonic() - start)
            await asyncio.sleep(0.005)
        return spent, by

    chosen = LimitsSettings(wrong.url(), limiter=LimiterSettings(heartbeat_seconds=0.2))
    try:
        async with (
            asyncio.timeout(2 * PATIENCE_SECONDS),
            open_limits(chosen, tmp_path, starts_with=[SEARCH], tuning=TUNING) as limits,
        ):
            assert (await asked(limits, 0.1))[1] == "counters"
            os.kill(wrong.server.pid, signal.SIGSTOP)
            spent, by = await asked(limits, 0.5)
            assert by == "local_share" and limits.status()["counters"] == "down"
            assert statistics.median(spent) < 0.01, "the deadline is 0.05 s"
            os.kill(wrong.server.pid, signal.SIGCONT)
            await until(limits, lambda: limits.status()["counters"] == "up", "up again")
            assert (await asked(limits, 0.1))[1] == "counters"
    finally:
        os.kill(wrong.server.pid, signal.SIGCONT)


async def test_user_without_channel_rights_is_reported_and_counts(
    wrong: Wrong, tmp_path: Path, postgres_server: Server
) -> None:
    """Since Redis 7 a new user may use no channel: rule changes come by the sync."""
    before = counted("notifications", "permission")
    chosen = LimitsSettings(wrong.url("deaf"), postgres_server.url, limiter=QUICK)
    try:
        with capture_logs() as lines:
            async with (
                asyncio.timeout(2 * PATIENCE_SECONDS),
                open_limits(chosen, tmp_path, starts_with=[SEARCH], tuning=TUNING) as limits,
            ):
                await until(
                    limits,
                    lambda: counted("notifications", "permission") >= before + 2,
                    "tried twice",
                )
                status = limits.status()
                assert status["counters"] == "up"
                assert status["notifications"].startswith("permission: ")
                (alarm,) = alarms({"limits": status})
                assert "permission" in alarm and "limits-redis.md" in alarm
                wrong.say("ACL SETUSER deaf &*")
                await until(
                    limits, lambda: limits.status()["notifications"] == "up", "notified again"
                )
    finally:
        wrong.say("ACL SETUSER deaf resetchannels")
    commands = [
        line["command"] for line in lines if line["event"] == "limits.notifications_unavailable"
    ]
    assert sorted(set(commands)) == sorted(commands), "each once"
    assert "S3CRET" not in repr(lines)


def run_commands_of(page: str, wrong: Wrong) -> None:
    blocks = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    environment = {**os.environ, "REDIS": wrong.url()}
    for command in "".join(blocks).splitlines():
        done = subprocess.run(
            ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=20
        )
        assert done.returncode == 0 and "ERR" not in done.stdout, command


async def test_runbook_commands_work_with_the_rights_it_names(wrong: Wrong, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "runbooks" / "limits-redis.md").read_text()
    run_commands_of(page, wrong)
    url = f"redis://holdfast:a%20password@127.0.0.1:{wrong.server.port}/0"
    async with asyncio.timeout(PATIENCE_SECONDS):
        async with opened(url, tmp_path) as limits:
            assert not (await limits.limiter.check("acme", "/api/search", "bob")).degraded
            assert limits.status()["counters"] == "up"
            await limits.limiter.reset(Check("acme", "/api/search", "bob"))
        source = RedisNotifications(url)
        notifications = source.notifications()
        await anext(notifications)
        await source.publish('{"epoch":1,"seq":7,"store":"ours"}')
        assert (await anext(notifications)).seq == 7
        await notifications.aclose()
        await source.aclose()
    every = set(re.findall(r"`([a-z_]+)`(?=[^|]*\|[^|]*\|[^|]*\|$)", page, re.MULTILINE))
    assert set(REASONS) <= every, "the page explains every reason"
