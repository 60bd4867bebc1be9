"""What a node keeps on disk for a start while all else is away: the last good rules, and how many nodes there are.

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
from holdfast.limits.rules import RuleSet, Snapshot

T = TypeVar("T")


class Saved(Struct, frozen=True):
    """A snapshot, when it was known to be complete (wall clock), and the digest that proves it whole.

    ``heard_epoch`` and ``heard`` are the place in the log from which doorbells had brought rules that are in it;
    ``store`` says whose log that is.
    """

    known_at: float
    digest: str
    snapshot: Snapshot
    heard: int = 0
    heard_epoch: int = 0
    store: str = ""


class _SavedNodes(Struct, frozen=True):
    nodes: Annotated[int, Meta(ge=1, le=1_000_000)]


def save(file: Path, saved: Saved) -> bool:
    """Replace the file in one step; False (and a line in the log) if the disk refuses."""
    return _replace(file, saved, saved.known_at)


def save_nodes(file: Path, nodes: int) -> bool:
    """As ``save``."""
    return _replace(file, _SavedNodes(nodes))


def known_complete(file: Path, known_at: float) -> bool:
    """What is in the file was everything at this moment too; False if the file is gone.

    Not forced to the disk: at worst the rules look older than they are.
    """
    try:
        os.utime(file, (known_at, known_at))
        return True
    except OSError:
        return False


def load(file: Path) -> Saved | None:
    """What was saved; None if there is nothing, or nothing that can be trusted."""
    found = _read(file, Saved)
    if found is None:
        return None
    saved, modified_at = found
    if RuleSet.of(saved.snapshot.rules).digest != saved.digest:
        telemetry.log.error("limits.snapshot_unreadable", file=file.name, error="its digest does not match")
        return None
    return structs.replace(saved, known_at=max(saved.known_at, modified_at))


def load_nodes(file: Path) -> int | None:
    """As ``load``."""
    found = _read(file, _SavedNodes)
    return found[0].nodes if found is not None else None


def _replace(file: Path, saved: Struct, modified_at: float | None = None) -> bool:
    fresh = file.with_suffix(".new")
    try:
        with fresh.open("wb") as out:
            out.write(msgspec.json.encode(saved))
            out.flush()
            if modified_at is not None:
                os.utime(out.fileno(), (modified_at, modified_at))
            os.fsync(out.fileno())
        fresh.replace(file)
        return True
    except OSError as error:
        telemetry.log.warning("limits.snapshot_not_saved", file=file.name, error=str(error))
        return False


def _read(file: Path, kind: type[T]) -> tuple[T, float] | None:
    """What is in the file, and the file's time."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind), file.stat().st_mtime
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        telemetry.log.error("limits.snapshot_unreadable", file=file.name, error=str(error))
        return None
