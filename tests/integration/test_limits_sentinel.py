"""Redis as it is run in production: behind Sentinel, as a cluster, with a policy that
evicts. All of them real.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from sentinel_service import PATIENCE_SECONDS, SECRET, SERVICE, SentinelService
from structlog.testing import capture_logs
from tls import certificate

from engines import Server, free_port
from engines import redis as redis_engine
from engines.fixtures import had
from holdfast.errors import BadSetting, Unavailable
from holdfast.limits.composition import LimitsParts, LimitsSettings, LimitsTuning, open_limits
from holdfast.limits.limiter.batch import BatchSettings
from holdfast.limits.limiter.settings import LimiterSettings
from holdfast.limits.rules import Rule
from holdfast.limits.rulestore.redis import RedisNotifications
from holdfast.resilience import BreakerSettings

LIMIT = 1_000
SEARCH = Rule("*", "/api/search", "fixed_window", LIMIT, 366 * 86_400.0)
QUICK = LimiterSettings(
    heartbeat_seconds=0.05,
    node_ttl_seconds=5.0,
    batch=BatchSettings(
        breaker=BreakerSettings(3, failure_window_seconds=1.0, open_duration_seconds=0.1)
    ),
)


@pytest.fixture(scope="module")
def service() -> Iterator[SentinelService]:
    started = list[Server]()
    try:
        yield had("redis", lambda: SentinelService(started))
    finally:
        for server in reversed(started):
            server.stop()


def opened(url: str, state: Path) -> AbstractAsyncContextManager[LimitsParts]:
    """Limits that notice a change of their counters within half a second."""
    chosen, tuning = LimitsSettings(url, limiter=QUICK), LimitsTuning(health_window_seconds=0.5)
    return open_limits(chosen, state, starts_with=[SEARCH], tuning=tuning)


async def until(limits: LimitsParts, condition: Callable[[], bool], what: str) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < PATIENCE_SECONDS, (
            f"waited in vain for: {what}; {limits.status()}"
        )
        await limits.limiter.check("acme", "/api/search", "somebody")
        await asyncio.sleep(0.01)


async def test_service_unknown_to_sentinel_is_reported_as_no_primary(
    service: SentinelService, tmp_path: Path
) -> None:
    url = service.url.replace(f"/{SERVICE}/", "/other/")
    async with asyncio.timeout(2 * PATIENCE_SECONDS), opened(url, tmp_path) as limits:
        await until(
            limits, lambda: limits.status()["counters_reason"] == "no_primary", "the reason"
        )
        assert SECRET not in str(limits.status())


async def test_sentinel_and_server_are_reached_with_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    common = {"tls-cert-file": str(cert), "tls-key-file": str(key), "tls-ca-cert-file": str(cert)}
    ports, started = (free_port(), free_port()), list[Server]()
    try:
        tls = {**common, "tls-auth-clients": "no", "tls-port": str(ports[0])}
        started.append(had("redis", lambda: redis_engine.start(**tls)))
        lines = [
            *(f"{name} {value}" for name, value in common.items()),
            "tls-auth-clients no",
            "tls-replication yes",
        ]
        watched = replace(started[0], port=ports[0])
        started.append(redis_engine.sentinel(watched, SERVICE, 1, *lines, f"tls-port {ports[1]}"))

        async def is_degraded(ca: str) -> bool:
            url = f"rediss+sentinel://127.0.0.1:{ports[1]}/{SERVICE}?{ca}"
            async with open_limits(
                LimitsSettings(url), tmp_path / "state", starts_with=[SEARCH]
            ) as limits:
                return (await limits.limiter.check("acme", "/api/search", "ann")).degraded

        assert not await is_degraded(f"ssl_ca_certs={cert}")
        assert await is_degraded(""), "no authority signed either certificate"
    finally:
        for server in started:
            server.stop()


async def test_counters_and_notifications_follow_a_sentinel_failover(
    service: SentinelService, tmp_path: Path
) -> None:
    source = RedisNotifications(service.url)
    with capture_logs() as lines:
        async with (
            asyncio.timeout(2 * PATIENCE_SECONDS),
            opened(service.url, tmp_path) as limits,
        ):
            used = [await limits.limiter.check("acme", "/api/search", "ann") for _ in range(10)]
            assert not any(decision.degraded for decision in used)
            await published_and_received(source, 1)
            assert service.primary_port() == service.primary.port
            await asyncio.to_thread(service.replicated)
            service.primary.process.kill()
            service.primary.process.wait()
            await until(limits, lambda: limits.status()["counters"] != "up", "its absence shows")
            await until(
                limits, lambda: limits.status()["counters"] == "up", "the new primary counts"
            )
            after = await limits.limiter.check("acme", "/api/search", "ann")
            assert (after.degraded, after.remaining) == (False, LIMIT - 11), (
                "the replica had what was counted"
            )
            await published_and_received(source, 2)
        await source.aclose()
    assert len([line for line in lines if line["event"] == "limits.counters_available"]) == 1
    assert SECRET not in repr(lines)


async def published_and_received(source: RedisNotifications, seq: int) -> None:
    """Like the feed, subscribe again if the connection was to the lost primary."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            notifications = source.notifications()
            try:
                await anext(notifications)
                await source.publish(f'{{"epoch":1,"seq":{seq},"store":"ours"}}')
                assert (await anext(notifications)).seq == seq
                return
            except Unavailable:
                await asyncio.sleep(0.05)
            finally:
                await notifications.aclose()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Server]:
    server = had("redis", redis_engine.cluster)
    yield server
    server.stop()


@pytest.mark.covers("004 Redis as a cluster")
async def test_redis_cluster_is_refused_at_startup_with_a_remedy(
    cluster: Server, tmp_path: Path
) -> None:
    with pytest.raises(
        BadSetting, match=r"limits.counters_url: this is Redis Cluster.*redis\+sentinel://"
    ):
        async with open_limits(LimitsSettings(cluster.url), tmp_path):
            raise AssertionError("it was opened")


async def test_unidentified_cluster_is_found_by_its_ratio(cluster: Server, tmp_path: Path) -> None:
    """Calls for keys of one slot succeed, but most checks never do."""
    rules = "ACL SETUSER quiet on nopass ~* &* +@all -info"
    redis_engine.say(cluster, *rules.split(" "))
    url = cluster.url.replace("://", "://quiet:x@")
    async with asyncio.timeout(2 * PATIENCE_SECONDS), opened(url, tmp_path) as limits:
        degraded = list[bool]()
        for _ in range(10):
            # a tenant's keys are of one slot, those of several tenants are not
            for turn in range(8):
                asked = [
                    limits.limiter.check(f"tenant-{n}", "/api/search", "ann")
                    for n in range(turn % 2 * 9 + 1)
                ]
                degraded += [decision.degraded for decision in await asyncio.gather(*asked)]
            await asyncio.sleep(0.05)
        assert any(degraded) and not all(degraded)
        status = limits.status()
        assert status["counters"] != "up" and status["counters_reason"] == "cluster", status


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_redis_with_eviction_is_refused_at_startup(
    redis_server: Server, tmp_path: Path, policy: str
) -> None:
    chosen = LimitsSettings(redis_server.url)
    redis_engine.say(redis_server, "CONFIG", "SET", "maxmemory-policy", policy)
    try:
        async with open_limits(chosen, tmp_path):
            pass  # without maxmemory nothing is ever evicted
        redis_engine.say(redis_server, "CONFIG", "SET", "maxmemory", "1gb")
        with pytest.raises(BadSetting, match=f"maxmemory-policy {policy}.*noeviction"):
            async with open_limits(chosen, tmp_path):
                pass
    finally:
        redis_engine.say(
            redis_server, "CONFIG", "SET", "maxmemory", "0", "maxmemory-policy", "noeviction"
        )


@pytest.mark.parametrize("reason", ["cluster", "eviction"])
async def test_eviction_found_later_stops_counting(tmp_path: Path, reason: str) -> None:
    """Redis was unavailable when the node started, so nothing could refuse to start."""
    port, servers = free_port(), list[Server]()
    settings = {"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"}
    if reason == "cluster":
        settings = {**redis_engine.CLUSTER, "cluster-port": str(free_port())}
    url = f"redis://127.0.0.1:{port}/0"
    try:
        async with asyncio.timeout(2 * PATIENCE_SECONDS), opened(url, tmp_path) as limits:
            await until(
                limits, lambda: limits.status()["counters_reason"] == "unreachable", "nobody there"
            )
            servers.append(await asyncio.to_thread(redis_engine.start, port, **settings))
            await until(limits, lambda: limits.status()["counters_reason"] == reason, "what it is")
            assert (await limits.limiter.check("acme", "/api/search", "ann")).degraded
    finally:
        for server in servers:
            server.stop()
