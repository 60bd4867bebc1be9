"""Where things are unless somebody says otherwise."""

from __future__ import annotations

import os
import stat
from pathlib import Path

STATE_NAME = "state"
_OF_A_VOLUME = {STATE_NAME, "lost+found"}


def default_state_dir() -> Path:
    """Where a server keeps its state, and where commands look for it, when neither is told."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    base = given if given.is_absolute() else Path("~/.local/state").expanduser()  # as the specification has it
    return base / "holdfast"


def others_can_write(directory: Path) -> bool:
    """Whether its mode lets others make, rename or remove files in it."""
    return bool(directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def state_dir_in(given: Path) -> Path:
    """Where the state is, if somebody names this directory: there; but a directory that others can write to and that
    is empty, as a volume is when it is mounted, has it in ``state``.
    """
    try:
        if others_can_write(given) and {entry.name for entry in given.iterdir()} <= _OF_A_VOLUME:
            return given / STATE_NAME
    except OSError:
        pass  # whoever uses it says what is wrong with it
    return given
