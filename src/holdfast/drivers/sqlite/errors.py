"""Translates SQLite's errors into ours: no adapter lets a foreign error out."""

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
    """When an error arose; this decides what is known of the outcome."""

    OPENING = "opening"
    WORKING = "working"
    COMMITTING = "committing"


TAKEN = (apsw.BusyError, apsw.LockedError, apsw.ProtocolError)
KEEPS_HANDLE = (apsw.ConstraintError, apsw.InterruptError, apsw.BusyError)
"""After these errors the connection stays usable; after any other it is closed."""


class _Meaning(NamedTuple):
    """What an error means, for the operator (names the file) and for everybody else."""

    errors: tuple[type[apsw.Error], ...]
    at_open: type[OperatorError]
    advice: str
    public: str


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
"""After these a commit has not written its commit frame: it did not happen."""


def translate(error: apsw.Error, path: str, doing: Doing) -> HoldfastError:
    """Our error for ``error``: what is known, and what to do.

    At startup the operator gets all of it. Later the server goes on and may recover:
    the log gets the file and the reason; the error, which clients see, has neither. The
    outcome of a failed commit is unknown, except for ``NOT_COMMITTED``.
    """
    meaning = next((meaning for meaning in MEANINGS if isinstance(error, meaning.errors)), None)
    cause = f"{type(error).__name__}: {error}"
    advice = meaning.advice.format(path=path, error=error) if meaning else cause
    if doing is Doing.OPENING:
        return (
            meaning.at_open(advice, file=path)
            if meaning
            else InternalError(f"{path}: {cause}", file=path)
        )
    telemetry.log.error(
        "drivers.sqlite_failed", file=path, doing=doing.value, cause=cause, advice=advice
    )
    if doing is Doing.COMMITTING and not isinstance(error, NOT_COMMITTED):
        return OutcomeUnknown(
            "the commit failed and nobody knows how far it came; retry with the same key"
        )
    return (
        Unavailable(meaning.public) if meaning else InternalError("the store failed; it is logged")
    )
