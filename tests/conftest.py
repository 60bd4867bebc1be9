"""What every test may use: the real engines (``tests/engines``), started when the first test asks for one.

``make test`` runs on all cores. The tests that take longest come first, so that the others never wait for one of them
in the end.
"""

from __future__ import annotations

import pytest

pytest_plugins = ["engines.fixtures", "tally"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
