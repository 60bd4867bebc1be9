"""A lock file that admits one worker process per job file.

The lock ends with its process, however the process ends. A forked child inherits the
descriptor and would keep the lock after its parent's death, so it closes it at once;
the parent keeps the lock.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from weakref import WeakSet

from holdfast.errors import Unavailable
from holdfast.work.contract import SessionTaken


class SessionLock:
    """The lock beside a job file. The lock file stays and names its last holder."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + "-lock")
        self._descriptor: int | None = None
        _locks.add(self)

    def take(self) -> None:
        """Take the lock; SessionTaken names the process that holds it."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unavailable(f"{self._path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise SessionTaken(
                f"process {holder or 'unknown'} runs the jobs of {self._path.name[:-5]}"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_locks: WeakSet[SessionLock] = WeakSet()


def _release_in_child() -> None:
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
