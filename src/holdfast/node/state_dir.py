"""The state directory: private to one user and locked by one process at a time."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shlex
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast import telemetry
from holdfast.drivers.files import STATE_NAME, others_can_write
from holdfast.drivers.sqlite.file_copy import cannot
from holdfast.drivers.sqlite.restore import finish
from holdfast.errors import StateDirectory

LOCK_NAME = "lock"
_masks: list[int] = []
"""The umask before each running block of ``held``; blocks may end in any order."""


@contextmanager
def held(directory: Path) -> Iterator[Path]:
    """Create the directory if needed (mode 0700) and lock it until the block ends.

    The lock ends with the process, however it dies; its file stays and names the last
    holder. StateDirectory says who holds the lock or what is wrong with the directory,
    for example that other users can write to it. Files made while the block runs are
    private to this user, whatever the directory's own mode. A restore that was killed
    half-way is completed first.
    """
    _make(directory)
    _check_private(directory)
    descriptor = _open_lock(directory)
    _masks.append(os.umask(0o077))
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateDirectory(
                f"{directory} is in use by process {_holder(descriptor)}; stop it, or choose"
                " another --state-dir",
                directory=str(directory),
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        _complete_restore(directory)
        yield directory
    finally:
        os.umask(_masks.pop())
        os.close(descriptor)


def holder(directory: Path) -> int | None:
    """The process that holds the lock, or None."""
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        text = _holder(descriptor)
        return int(text) if text.isdigit() else None
    finally:
        os.close(descriptor)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StateDirectory(
            f"{directory} is not a directory; choose another --state-dir"
        ) from None
    except OSError as error:
        raise StateDirectory(
            f"{directory} cannot be made ({error.strerror}); choose another --state-dir"
        ) from error


def _check_private(directory: Path) -> None:
    """StateDirectory, with the remedy, if other users could replace our files."""
    try:
        found, shared = directory.lstat(), others_can_write(directory.parent)
        mode = stat.S_IMODE(directory.stat().st_mode)
    except OSError as error:
        raise StateDirectory(
            f"{directory} cannot be read ({error.strerror}); choose another --state-dir"
        ) from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StateDirectory(
            f"others can write to {directory} (mode {mode:04o}): run `chmod 700"
            f" {shlex.quote(str(directory))}`",
            directory=str(directory),
        )
    if (
        shared
        and directory.name == STATE_NAME
        and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid())
    ):
        raise StateDirectory(
            f"{directory} was made by somebody else; remove it, or choose another --state-dir"
        )


def _open_lock(directory: Path) -> int:
    try:
        return os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateDirectory(
            f"{directory} cannot be written ({error.strerror}); check its mode, or choose another"
            " --state-dir",
            directory=str(directory),
        ) from error


def _complete_restore(directory: Path) -> None:
    try:
        finish(directory)
    except OSError as error:
        raise cannot(f"the restore of {directory} cannot be completed", error) from error


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"


async def show_disk(path: Path) -> None:
    """Show how full the disk is. In a thread: a file system that hangs must not hang
    the node.
    """
    usage = await asyncio.to_thread(shutil.disk_usage, path)
    telemetry.disk(usage.total, usage.free)
