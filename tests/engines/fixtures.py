"""The engines as pytest fixtures, one server per test session; a missing one skips, or fails if it is required.

``HOLDFAST_REQUIRE_ENGINES=all`` (or a list of names) turns the skip into a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from engines import Missing, Server, postgres, redis


def served(name: str, start: Callable[[], Server], session: pytest.Session) -> Iterator[Server]:
    """The body of an engine's fixture."""
    try:
        server = start()
    except Missing as error:
        required = os.environ.get("HOLDFAST_REQUIRE_ENGINES", "").split(",")
        if "all" in required or name in required:
            pytest.fail(f"{name} is required: {error}", pytrace=False)
        pytest.skip(f"no {name}: {error}")
    yield server
    kept = server.stop(keep_log=bool(session.testsfailed))
    if kept is not None:
        print(f"\nthe log of {name} is kept in {kept}")


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A PostgreSQL of this test session; ``.url`` leads to its database ``postgres``."""
    yield from served("postgres", postgres.start, request.session)


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A Redis of this test session; who needs it empty flushes it."""
    yield from served("redis", redis.start, request.session)
