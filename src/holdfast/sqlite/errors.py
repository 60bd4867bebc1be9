"""What SQLite's errors mean here. Nothing foreign leaves an adapter."""

from __future__ import annotations

from enum import Enum

import apsw

from holdfast.errors import (
    HoldfastError,
    InternalError,
    OutcomeUnknown,
    StateCorrupted,
    StateDirectory,
    Unavailable,
)


class Doing(Enum):
    """When an error arose; it decides what is known of the outcome."""

    OPENING = "opening"
    WORKING = "working"
    COMMITTING = "committing"


FULL = (apsw.FullError,)
DAMAGED = (apsw.CorruptError, apsw.NotADBError, apsw.FormatError)
FORBIDDEN = (apsw.ReadOnlyError, apsw.PermissionsError, apsw.CantOpenError, apsw.AuthError)
TAKEN = (apsw.BusyError, apsw.LockedError, apsw.ProtocolError)
AWAY = (apsw.IOError, apsw.NoMemError, apsw.InterruptError, apsw.AbortError, apsw.SchemaChangeError, apsw.NoLFSError)
KEEPS_HANDLE = (apsw.ConstraintError, apsw.InterruptError, apsw.BusyError)
"""After these the connection is as good as before; after any other it is closed and never used again."""


def translate(error: apsw.Error, path: str, doing: Doing) -> HoldfastError:
    """The error of ours that says what is known and what to do.

    A failed commit is unknown but for a full disk and a busy file: with either, SQLite has not written the end
    of the transaction, so it cannot come back.
    """
    if isinstance(error, FULL):
        return _at_open(StateDirectory, doing)(f"the disk that holds {path} is full; free some space on it", file=path)
    if isinstance(error, TAKEN):
        return _at_open(StateDirectory, doing)(f"another program uses {path}; close it", file=path)
    if doing is Doing.COMMITTING:
        return OutcomeUnknown(f"a commit to {path} failed ({error}); retry with the same key", file=path)
    if isinstance(error, DAMAGED):
        return _at_open(StateCorrupted, doing)(
            f"{path} is damaged ({error}); stop the server and run `holdfast restore` with a backup", file=path
        )
    if isinstance(error, FORBIDDEN):
        return _at_open(StateDirectory, doing)(
            f"{path} cannot be opened or written ({error}); check its directory, owner and mode", file=path
        )
    if isinstance(error, AWAY):
        return _at_open(StateDirectory, doing)(f"{path} cannot be used now ({error}); check its disk", file=path)
    return InternalError(f"{path}: {type(error).__name__}: {error}", file=path)


def _at_open(kind: type[HoldfastError], doing: Doing) -> type[HoldfastError]:
    """At start the operator is told; later the server goes on and may heal."""
    return kind if doing is Doing.OPENING else Unavailable
