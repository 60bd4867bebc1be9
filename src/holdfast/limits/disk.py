"""The last good rules on disk, for a start while the database is away.

When they were last known to be complete is the file's own time: a node at rest looks every few seconds, and rules that
have not changed are not written again for it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from holdfast import telemetry
from holdfast.limits.rules import RuleSet, Snapshot


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


def save(file: Path, saved: Saved) -> bool:
    """Replace the file in one step; False (and a line in the log) if the disk refuses."""
    fresh = file.with_suffix(".new")
    try:
        with fresh.open("wb") as out:
            out.write(msgspec.json.encode(saved))
            out.flush()
            os.utime(out.fileno(), (saved.known_at, saved.known_at))
            os.fsync(out.fileno())
        fresh.replace(file)
        return True
    except OSError as error:
        telemetry.log.warning("limits.snapshot_not_saved", error=str(error))
        return False


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
    try:
        saved = msgspec.json.decode(file.read_bytes(), type=Saved)
        known_at = file.stat().st_mtime
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        telemetry.log.error("limits.snapshot_unreadable", error=str(error))
        return None
    if RuleSet.of(saved.snapshot.rules).digest != saved.digest:
        telemetry.log.error("limits.snapshot_unreadable", error="its digest does not match")
        return None
    return structs.replace(saved, known_at=max(saved.known_at, known_at))
