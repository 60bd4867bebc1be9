"""Every kind of URL of ``limits.counters_url``: counters and notifications use it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from tls import certificate

from engines import free_port, redis
from engines.fixtures import had
from holdfast.limits.composition import LimitsParts, LimitsSettings, open_limits
from holdfast.limits.rules import Rule
from holdfast.limits.rulestore.redis import RedisNotifications

SEARCH = Rule("acme", "/api/search", "fixed_window", 2, 366 * 86_400.0)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One Redis that listens in three ways; no authority signed its certificate."""
    folder = tmp_path_factory.mktemp("redis")
    cert, key = certificate(folder)
    port = free_port()
    tls = {
        "tls-port": str(port),
        "tls-cert-file": str(cert),
        "tls-key-file": str(key),
        "tls-auth-clients": "no",
    }
    server = had("redis", lambda: redis.start(unixsocket=str(folder / "socket"), **tls))
    try:
        yield {
            "redis": server.url,
            "unix": f"unix://{folder / 'socket'}?db=0",
            "rediss": f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={cert}",
            "untrusted": f"rediss://127.0.0.1:{port}/0",
        }
    finally:
        server.stop()


def opened(url: str, state: Path) -> AbstractAsyncContextManager[LimitsParts]:
    return open_limits(LimitsSettings(url), state, starts_with=[SEARCH])


@pytest.mark.parametrize("kind", ["redis", "unix", "rediss"])
async def test_counters_and_notifications_are_reached_by_every_kind_of_url(
    urls: dict[str, str], kind: str, tmp_path: Path
) -> None:
    async with asyncio.timeout(30):
        async with opened(urls[kind], tmp_path) as limits:
            decisions = [await limits.limiter.check("acme", "/api/search", kind) for _ in range(3)]
            assert [d.allowed for d in decisions] == [True, True, False]
            assert not any(d.degraded for d in decisions)
        source = RedisNotifications(urls[kind])
        notifications = source.notifications()
        await anext(notifications)
        await source.publish('{"epoch":1,"seq":7,"store":"ours"}')
        assert (await anext(notifications)).seq == 7
        await notifications.aclose()
        await source.aclose()


async def test_redis_with_an_untrusted_certificate_is_not_used(
    urls: dict[str, str], tmp_path: Path
) -> None:
    async with asyncio.timeout(30), opened(urls["untrusted"], tmp_path) as limits:
        assert (await limits.limiter.check("acme", "/api/search", "ann")).degraded
