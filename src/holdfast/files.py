"""Files that are whole after a power cut: what is said to be there is there."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, modified_at: float | None = None) -> None:
    """Replace ``path``, mode 0600, at once and durably: a reader or a power cut finds the old or the new file.

    ``modified_at``: the time it shows. Raises OSError; then the old file is still there, unless only the new one's
    durability failed.
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
