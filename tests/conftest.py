"""What every test may use: the real engines (``tests/engines``), started when the first
test asks for one.

``make test`` runs on all cores. The tests that take longest come first, so that the
others never wait for one of them in the end. An example of a property may take its
time: a machine that pauses disproves nothing.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import uvloop

from proof import virtual_loop

pytest_plugins = ["engines.fixtures", "result_counts"]

hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m alone`` only the files that have such a test are imported: all of them
    would take longer than it.
    """
    if config.getoption("markexpr") != "alone" or collection_path.suffix != ".py":
        return None
    return "pytest.mark.alone" not in collection_path.read_text() or None


def pytest_collection_finish() -> None:
    """The tests themselves stay: looking through all of them for garbage would take
    half a second each time.
    """
    gc.freeze()


VIRTUAL = {"unit", "simulation"}
"""Folders whose async tests run on a virtual clock, as do the files of ``tests``
itself.
"""


def _runner(item: pytest.Function) -> Callable[[Coroutine[Any, Any, object]], object]:
    """The loop of an async test: virtual or real by its folder, unless a marker says
    otherwise. ``real_time("uvloop")`` is the loop of the server.
    """
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    is_virtual = folder in VIRTUAL or folder.endswith(".py")
    if item.get_closest_marker("virtual_time"):
        is_virtual = True
    elif (real := item.get_closest_marker("real_time")) is not None:
        return uvloop.run if "uvloop" in real.args else asyncio.run
    return virtual_loop.run if is_virtual else asyncio.run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Let pytest call ``async def test_…`` like any other test."""
    holder, name = (
        (pyfuncitem.obj.hypothesis, "inner_test")
        if hasattr(pyfuncitem.obj, "hypothesis")
        else (pyfuncitem, "obj")
    )
    test = getattr(holder, name)
    if not inspect.iscoroutinefunction(test):
        return
    run = _runner(pyfuncitem)

    @functools.wraps(test)
    def run_test(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    setattr(holder, name, run_test)
