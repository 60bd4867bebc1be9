"""What several suites of the store start from."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_rigs import RIGS, MemoryRig, PostgresRig, Rig, SqliteRig


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    """Each store in turn."""
    if request.param == "postgres":
        return PostgresRig(request.getfixturevalue("postgres_server").url)
    return MemoryRig() if request.param == "memory" else SqliteRig(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True, text=True
    )
    if mounting.returncode != 0:
        pytest.skip(f"a small file system needs root and mount: {mounting.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)
