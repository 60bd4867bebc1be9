"""What SQLite's errors mean here. Nothing foreign leaves an adapter."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import apsw

from holdfast import telemetry
from holdfast.errors import (
    DiskFull,
    HoldfastError,
    InternalError,
    OperatorError,
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


TAKEN = (apsw.BusyError, apsw.LockedError, apsw.ProtocolError)
KEEPS_HANDLE = (apsw.ConstraintError, apsw.InterruptError, apsw.BusyError)
"""After these the connection is as good as before; after any other it is closed and never used again."""


class _Meaning(NamedTuple):
    """What some errors mean: to the operator, who knows the file, and to everybody else, who need not."""

    errors: tuple[type[apsw.Error], ...]
    at_open: type[OperatorError]
    advice: str
    told: str


MEANINGS = (
    _Meaning(
        (apsw.FullError,),
        DiskFull,
        "the disk that holds {path} is full; free some space on it",
        "the server's disk is full; its operator must free some space",
    ),
    _Meaning(
        TAKEN,
        StateDirectory,
        "another program uses {path}; close it",
        "another program uses the server's files; its operator must close it",
    ),
    _Meaning(
        (apsw.CorruptError, apsw.NotADBError, apsw.FormatError),
        StateCorrupted,
        "{path} is damaged ({error}); stop the server and run `holdfast restore` with a backup",
        "the server's files are damaged; its operator must restore a backup",
    ),
    _Meaning(
        (apsw.ReadOnlyError, apsw.PermissionsError, apsw.CantOpenError, apsw.AuthError),
        StateDirectory,
        "{path} cannot be opened or written ({error}); check its directory, owner and mode",
        "the server cannot open or write its files; its operator must check their owner and mode",
    ),
    _Meaning(
        (apsw.InterruptError,),
        StateDirectory,
        "{path} cannot be used now ({error}); check its disk, and that it is not full",
        "there was no time left to read; try again later",
    ),
    _Meaning(
        (apsw.IOError, apsw.NoMemError, apsw.AbortError, apsw.SchemaChangeError, apsw.NoLFSError),
        StateDirectory,
        "{path} cannot be used now ({error}); check its disk, and that it is not full",
        "the server's disk does not answer as it should; try again later",
    ),
)
NOT_COMMITTED = (apsw.FullError, *TAKEN)
"""A commit that fails so has not written the end of its transaction, and cannot come back."""


def translate(error: apsw.Error, path: str, doing: Doing) -> HoldfastError:
    """The error of ours that says what is known and what to do.

    At start the operator is told all of it. Later the server goes on and may heal, the log has the file and the
    reason, and the error, which reaches clients, has neither. A failed commit is unknown but for ``NOT_COMMITTED``.
    """
    meaning = next((meaning for meaning in MEANINGS if isinstance(error, meaning.errors)), None)
    cause = f"{type(error).__name__}: {error}"
    advice = meaning.advice.format(path=path, error=error) if meaning else cause
    if doing is Doing.OPENING:
        return meaning.at_open(advice, file=path) if meaning else InternalError(f"{path}: {cause}", file=path)
    telemetry.log.error("sqlite", file=path, doing=doing.value, cause=cause, advice=advice)
    if doing is Doing.COMMITTING and not isinstance(error, NOT_COMMITTED):
        return OutcomeUnknown("the commit failed and nobody knows how far it came; retry with the same key")
    return Unavailable(meaning.told) if meaning else InternalError("the store failed; it is logged")
