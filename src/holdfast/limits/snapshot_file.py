"""What a node keeps on disk, mostly to start while its dependencies are unavailable.

That is the last good rules, the nodes that share the counters, and the name generated
for this node. The modification time of the rules file is when the rules were last known
to be complete: an idle node confirms them every few seconds, and need not rewrite them
for that.
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
    """A snapshot, when it was known to be complete (wall clock), and its digest.

    ``announced`` is the last log position whose rule came by notification.
    """

    known_at: float
    digest: str
    snapshot: RuleSnapshot
    announced: tuple[int, int] = msgspec.field(name="heard")


class _SavedName(Struct, frozen=True):
    name: Annotated[str, Meta(pattern=f"^[!-~]{{1,{ID_BYTES_MAX}}}$")]


class SavedNodes(Struct, frozen=True):
    """The number of nodes, and their names if all were known."""

    nodes: Annotated[int, Meta(ge=1, le=1_000_000)]
    names: Annotated[tuple[str, ...], Meta(max_length=NODE_NAMES_MAX)] = ()


class RulesFile:
    """The last good rules on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._there: tuple[str, str, int] | None = None

    def load(self) -> SavedRules | None:
        """The saved rules; None if there are none that can be trusted."""
        found = _read(self._path, SavedRules)
        if found is None:
            return None
        saved, modified_at = found
        if RuleSet.of(saved.snapshot.rules).digest != saved.digest:
            telemetry.log.error(
                "limits.file_unreadable", file=self._path.name, error="its digest does not match"
            )
            return None
        self._there = _what(saved)
        return structs.replace(saved, known_at=max(saved.known_at, modified_at))

    def save(self, saved: SavedRules) -> None:
        """Write the rules if they differ, else only when they were complete.

        That update is not synced to disk: at worst the rules look older than they are.
        """
        if self._there == _what(saved) and _touch(self._path, saved.known_at):
            return
        if _replace(self._path, saved, saved.known_at):
            self._there = _what(saved)


def _what(saved: SavedRules) -> tuple[str, str, int]:
    return saved.digest, saved.snapshot.store, saved.snapshot.epoch


def identity(state: Path, ids: Ids) -> str:
    """The generated name of this state directory's node: a restart keeps it.

    If the disk cannot store it, the next start counts as a new node; nothing worse
    happens.
    """
    file = state / NODE_NAME_FILE
    found = _read(file, _SavedName)
    if found is not None:
        return found[0].name
    name = ids.new("node_")
    _replace(file, _SavedName(name))
    return name


def load_nodes(file: Path) -> SavedNodes | None:
    """The saved nodes; None if there are none that can be trusted."""
    found = _read(file, SavedNodes)
    return found[0] if found is not None else None


def save_nodes(file: Path, saved: SavedNodes) -> bool:
    """False if the disk refuses."""
    return _replace(file, saved)


def _replace(file: Path, saved: Struct, modified_at: float | None = None) -> bool:
    """False, and a line in the log, if the disk refuses."""
    try:
        replace_file(file, msgspec.json.encode(saved), modified_at)
        return True
    except OSError as error:
        telemetry.log.warning("limits.file_not_saved", file=file.name, error=str(error))
        return False


def _touch(file: Path, modified_at: float) -> bool:
    """False if the file is gone."""
    try:
        os.utime(file, (modified_at, modified_at))
        return True
    except OSError:
        return False


def _read(file: Path, kind: type[T]) -> tuple[T, float] | None:
    """The content and modification time of the file."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind), file.stat().st_mtime
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        telemetry.log.error("limits.file_unreadable", file=file.name, error=str(error))
        return None
