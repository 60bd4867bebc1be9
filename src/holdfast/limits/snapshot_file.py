"""What a node keeps on disk, mostly for a start while all else is away: the last good rules, how many nodes there are,
and the name that was made up for this one.

When the rules were last known to be complete is their file's own time: a node at rest looks every few seconds, and
rules that have not changed are not written again for it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct, structs

from holdfast import telemetry
from holdfast.clock import Ids
from holdfast.drivers.files import replace_file
from holdfast.limits.counters.contract import NODE_NAMES_MAX
from holdfast.limits.rules import RuleSet, RuleSnapshot
from holdfast.message import ID_BYTES_MAX

T = TypeVar("T")
NODE_NAME_FILE = "name.json"


class SavedRules(Struct, frozen=True):
    """A snapshot, when it was known to be complete (wall clock), and the digest that proves it whole.

    ``heard`` is the last place in the log from which doorbells had brought rules that are in it.
    """

    known_at: float
    digest: str
    snapshot: RuleSnapshot
    heard: tuple[int, int]


class _SavedName(Struct, frozen=True):
    name: Annotated[str, Meta(pattern=f"^[!-~]{{1,{ID_BYTES_MAX}}}$")]


class SavedNodes(Struct, frozen=True):
    """How many nodes were known, and their names; none if not all were."""

    nodes: Annotated[int, Meta(ge=1, le=1_000_000)]
    names: Annotated[tuple[str, ...], Meta(max_length=NODE_NAMES_MAX)] = ()


class RulesFile:
    """The last good rules on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._there: tuple[str, str, int] | None = None

    def load(self) -> SavedRules | None:
        """What was saved; None if there is nothing, or nothing that can be trusted."""
        found = _read(self._path, SavedRules)
        if found is None:
            return None
        saved, modified_at = found
        if RuleSet.of(saved.snapshot.rules).digest != saved.digest:
            telemetry.log.error("limits.file_unreadable", file=self._path.name, error="its digest does not match")
            return None
        self._there = _what(saved)
        return structs.replace(saved, known_at=max(saved.known_at, modified_at))

    def save(self, saved: SavedRules) -> None:
        """All of it if others are there, else only when they were known to be complete.

        That alone is not forced to the disk: at worst the rules look older than they are.
        """
        if self._there == _what(saved) and _touch(self._path, saved.known_at):
            return
        if _replace(self._path, saved, saved.known_at):
            self._there = _what(saved)


def _what(saved: SavedRules) -> tuple[str, str, int]:
    return saved.digest, saved.snapshot.store, saved.snapshot.epoch


def identity(state: Path, ids: Ids) -> str:
    """The name made up for the node of this state directory; a restart is nobody new to those who count nodes.

    A disk that cannot keep it does no more harm than that the next start is.
    """
    file = state / NODE_NAME_FILE
    found = _read(file, _SavedName)
    if found is not None:
        return found[0].name
    name = ids.new("node_")
    _replace(file, _SavedName(name))
    return name


def load_nodes(file: Path) -> SavedNodes | None:
    """What was saved; None if there is nothing, or nothing that can be trusted."""
    found = _read(file, SavedNodes)
    return found[0] if found is not None else None


def save_nodes(file: Path, saved: SavedNodes) -> bool:
    """False if the disk refuses."""
    return _replace(file, saved)


def _replace(file: Path, saved: Struct, modified_at: float | None = None) -> bool:
    """False (and a line in the log) if the disk refuses."""
    try:
        replace_file(file, msgspec.json.encode(saved), modified_at)
        return True
    except OSError as error:
        telemetry.log.warning("limits.file_not_saved", file=file.name, error=str(error))
        return False


def _touch(file: Path, modified_at: float) -> bool:
    """False if it is gone."""
    try:
        os.utime(file, (modified_at, modified_at))
        return True
    except OSError:
        return False


def _read(file: Path, kind: type[T]) -> tuple[T, float] | None:
    """What is in the file, and the file's time."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind), file.stat().st_mtime
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        telemetry.log.error("limits.file_unreadable", file=file.name, error=str(error))
        return None
