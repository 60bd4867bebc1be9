"""Files that survive a power cut whole, and where the state directory is.

``replace_file`` returns when the new content is on stable storage, name and all.
``default_state_dir`` and ``state_dir_in`` answer the same way for the server and for
the commands that look for it. ``read_table`` reads a settings file.
"""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from holdfast.errors import BadSetting


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory, to stable storage. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, modified_at: float | None = None) -> None:
    """Replace ``path`` (mode 0600) atomically and durably.

    A reader, also after a power cut, finds the old or the new file. ``modified_at`` is
    the modification time to set. Raises OSError: the old file is then still there,
    unless only the last step, syncing the directory, failed.
    """
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        if modified_at is not None:
            os.utime(file.fileno(), (modified_at, modified_at))
        os.fsync(file.fileno())
    beside.replace(path)
    sync(path.parent)


STATE_NAME = "state"
_OF_A_VOLUME = {STATE_NAME, "lost+found"}


def default_state_dir() -> Path:
    """Where a server keeps its state, and commands look for it, by default."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    # XDG: ignore relative
    base = given if given.is_absolute() else Path("~/.local/state").expanduser()
    return base / "holdfast"


def others_can_write(directory: Path) -> bool:
    """Whether the mode lets other users create, rename or remove files in it."""
    return bool(directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def state_dir_in(given: Path) -> Path:
    """The state directory for a directory that an operator names: usually itself.

    A freshly mounted volume is empty and other users can write to it; there the state
    is in the sub-folder ``state``.
    """
    try:
        if others_can_write(given) and {entry.name for entry in given.iterdir()} <= _OF_A_VOLUME:
            return given / STATE_NAME
    except OSError:
        pass  # opening it reports what is wrong with it
    return given


def read_table(file: Path) -> dict[str, Any]:
    """The settings of a TOML or YAML file. BadSetting if it cannot be read."""
    try:
        text = file.read_text()
    except OSError as error:
        raise BadSetting(f"the settings file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadSetting(f"the settings file {file} is not text in UTF-8") from None
    try:
        tree = tomllib.loads(text) if file.suffix == ".toml" else _read_yaml(text)
    except ValueError as error:
        raise BadSetting(
            f"the settings file {file} is not valid {file.suffix[1:] or 'YAML'}: {error}"
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise BadSetting(
            f"the settings file {file} must hold a table of settings, not a {type(tree).__name__}"
        )
    return tree


def _read_yaml(text: str) -> Any:
    """ValueError if it is not valid."""
    import yaml  # imported only for such a file

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
