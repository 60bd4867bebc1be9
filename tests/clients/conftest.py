"""Tests with foreign clients take minutes and need other registries: `make engines`
names this folder, and a run of all tests leaves it out.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Only a run that names this folder collects it."""
    here = Path(__file__).parent
    named = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(here) for path in named) else True
