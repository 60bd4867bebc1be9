"""The engines as pytest fixtures, one server per test session; a missing one skips, or
fails if it is required.

``HOLDFAST_REQUIRE_ENGINES=all`` (or a list of names) turns the skip into a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from engines import Impossible, Missing, Server, pgbouncer, postgres, redis
from engines.faketime import WallClock
from engines.promtool import Promtool
from engines.strace import Strace

T = TypeVar("T")


def had(name: str, get: Callable[[], T]) -> T:
    """An engine of this machine; else the test is skipped, or fails if required."""
    try:
        return get()
    except Missing as error:
        required = os.environ.get("HOLDFAST_REQUIRE_ENGINES", "").split(",")
        if ("all" in required or name in required) and not isinstance(error, Impossible):
            pytest.fail(f"{name} is required: {error}", pytrace=False)
        pytest.skip(f"no {name}: {error}")


def served(name: str, start: Callable[[], Server], session: pytest.Session) -> Iterator[Server]:
    """The body of an engine's fixture."""
    server = had(name, start)
    yield server
    kept = server.stop(keep_log=bool(session.testsfailed))
    if kept is not None:
        print(f"\nthe log of {name} is kept in {kept}")


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A PostgreSQL of this test session; ``.url`` is of its database ``postgres``."""
    yield from served("postgres", postgres.start, request.session)


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A Redis of this test session; who needs it empty flushes it."""
    yield from served("redis", redis.start, request.session)


@pytest.fixture
def pooler(postgres_server: Server) -> Iterator[Callable[..., Server]]:
    """Start PgBouncer before the session's PostgreSQL, with a ``pool_mode`` and other
    settings of its own.
    """
    started = list[Server]()

    def start(pool_mode: str, **settings: str) -> Server:
        started.append(
            had("pgbouncer", lambda: pgbouncer.start(postgres_server, pool_mode, **settings))
        )
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def wall_clock(tmp_path: Path) -> WallClock:
    """A wall clock for processes of this test."""
    return had("faketime", lambda: WallClock(tmp_path))


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    """Prometheus' own checks of rules."""
    return had("promtool", Promtool)


@pytest.fixture(scope="session")
def strace() -> Strace:
    """Faults in the system calls of processes of this test session."""
    return had("strace", Strace)
