"""Where things are unless somebody says otherwise."""

from __future__ import annotations

import os
from pathlib import Path


def default_state_dir() -> Path:
    """Where a server keeps its state, and where commands look for it, when neither is told."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    base = given if given.is_absolute() else Path("~/.local/state").expanduser()  # as the specification has it
    return base / "holdfast"
