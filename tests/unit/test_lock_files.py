"""Whatever can be installed is pinned by version and hash, and no lock file names a
registry.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@cache
def pinned(lock: Path) -> dict[str, tuple[str, int]]:
    """Name -> its version and how many hashes it has."""
    found = {}
    for block in re.split(r"\n(?=\S)", lock.read_text()):
        if (start := re.match(r"([A-Za-z0-9_.-]+)==(\S+)", block)) is not None:
            found[start[1].lower().replace("_", "-")] = (start[2], block.count("--hash=sha256:"))
    return found


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_has_a_lock_file_that_pins_what_it_needs(extra: str) -> None:
    lock = ROOT / "requirements" / f"{extra}.lock"
    assert lock.exists(), f"`make lock` writes {lock.name}: name the extra in its loop"
    assert {name_of(requirement) for requirement in EXTRAS[extra]} <= pinned(lock).keys()


def test_the_lock_file_of_the_server_pins_what_it_needs() -> None:
    needed = {name_of(requirement) for requirement in PROJECT["project"]["dependencies"]}
    assert needed <= pinned(ROOT / "requirements/run.lock").keys()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_pin_has_a_hash_and_no_lock_names_a_registry(lock: Path) -> None:
    assert pinned(lock)
    assert [name for name, (_, hashes) in pinned(lock).items() if not hashes] == []
    assert "://" not in lock.read_text()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_lock_files_agree_on_the_versions_that_they_share(lock: Path) -> None:
    everywhere = {name: pin[0] for name, pin in pinned(ROOT / "requirements/dev.lock").items()}
    everywhere |= {name: pin[0] for name, pin in pinned(ROOT / "requirements/run.lock").items()}
    for name, (version, _) in pinned(lock).items():
        assert everywhere.get(name, version) == version, f"{name} differs: run `make lock`"
