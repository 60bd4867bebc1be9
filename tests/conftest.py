"""What every test may use: the real engines (``tests/engines``), started when the first test asks for one.

``make test`` runs on all cores. The tests that take longest come first, so that the others never wait for one of them
in the end. An example of a property may take its time: a machine that pauses disproves nothing.
"""

from __future__ import annotations

import hypothesis
import pytest

pytest_plugins = ["engines.fixtures", "tally"]

hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
