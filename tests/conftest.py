"""What every test may use: the real engines (``tests/engines``), started when the first test asks for one.

``make test`` runs on all cores. The tests that take longest come first, so that the others never wait for one of them
in the end. An example of a property may take its time: a machine that pauses disproves nothing.
"""

from __future__ import annotations

import gc
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["engines.fixtures", "tally"]

hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m alone`` only the files that have such a test are imported: all of them would take longer than it."""
    if config.getoption("markexpr") != "alone" or collection_path.suffix != ".py":
        return None
    return "pytest.mark.alone" not in collection_path.read_text() or None


def pytest_collection_finish() -> None:
    """The tests themselves stay: looking through all of them for garbage would take half a second each time."""
    gc.freeze()
