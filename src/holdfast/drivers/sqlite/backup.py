"""A backup: a folder with a copy of every state file, and a manifest to check them by.

Each copy is a snapshot of one file; two copies are not of the same moment. So the order
of copying matters: a file that points into another is copied before it. After a restore
it then lags behind (work is done again) and never runs ahead (work would be left out).

The folder gets its name only when everything in it is on stable storage and has been
read back and checked.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast import telemetry
from holdfast.drivers.files import sync
from holdfast.drivers.sqlite.file_copy import (
    CopiedFile,
    CopyProgress,
    StateFile,
    cannot,
    copy_database,
    copy_file,
    describe,
    quiet,
)
from holdfast.errors import StateCorrupted, StateDirectory

FORMAT = "holdfast-backup"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"


class Manifest(Struct, frozen=True):
    """The description of a backup. ``digest`` covers all other fields."""

    format: str
    version: int
    holdfast: str
    taken_at: str
    files: tuple[CopiedFile, ...]
    digest: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def sealed(self) -> Manifest:
        """The same manifest with its digest."""
        digest = hashlib.sha256(msgspec.json.encode(replace(self, digest=""))).hexdigest()
        return replace(self, digest=digest)


class _Kind(Struct, frozen=True):
    """The fields that every version of a manifest has."""

    format: str
    version: int


class Contents(Struct, frozen=True):
    """The files of a state directory: databases in copying order, and plain files.

    The others point into the last database: without it there is no backup. ``derived``
    files are made from the databases and are replaced together with them.
    """

    parts: Sequence[StateFile]
    plain: Sequence[str] = ()
    derived: Sequence[str] = ()

    @property
    def needed(self) -> StateFile:
        return self.parts[-1]

    def part(self, name: str) -> StateFile | None:
        return next((part for part in self.parts if part.name == name), None)


def take(
    state: Path,
    target: Path,
    contents: Contents,
    *,
    at: str,
    program: str,
    progress: CopyProgress = quiet,
) -> Manifest:
    """Copy the files in ``state`` into the new folder ``target`` while the server runs.

    Blocks. Only one at a time may run per parent folder of ``target``: leftovers of
    killed backups there are removed. Raises OperatorErrors; then there is no folder.
    """
    if target.exists():
        raise StateDirectory(f"{target} exists; choose another name for the backup")
    partial = target.with_name(target.name + PARTIAL)
    try:
        target.parent.mkdir(mode=0o700, exist_ok=True)
        for leftover in target.parent.glob(f"*{PARTIAL}"):
            shutil.rmtree(leftover)
        partial.mkdir(mode=0o700)
        try:
            files = _copy_all(state, partial, contents, progress)
            manifest = Manifest(FORMAT, FORMAT_VERSION, program, at, files).sealed()
            _write(partial / MANIFEST, manifest)
            sync(partial)
            telemetry.mark("backup.complete")
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        sync(target.parent)
    except OSError as error:
        raise cannot(f"the backup {target} cannot be written", error) from error
    return manifest


def _copy_all(
    state: Path, folder: Path, contents: Contents, progress: CopyProgress
) -> tuple[CopiedFile, ...]:
    files = []
    for part in contents.parts:
        if (state / part.name).exists():
            copy_database(state / part.name, folder / part.name, progress)
            files.append(_described(state / part.name, folder / part.name, part, progress))
            telemetry.mark(f"backup.{part.name}")
        elif part is contents.needed:
            raise _useless(state / part.name, "gone")
    for name in contents.plain:
        if (state / name).exists():
            copy_file(state / name, folder / name, progress)
            files.append(describe(folder / name, None, progress))
    return tuple(files)


def _described(source: Path, copy: Path, part: StateFile, progress: CopyProgress) -> CopiedFile:
    """Check a new copy and describe it; a damaged copy means a damaged source."""
    try:
        return describe(copy, part, progress)
    except StateCorrupted as error:
        raise _useless(source, "damaged") from error


def _useless(source: Path, why: str) -> StateCorrupted:
    return StateCorrupted(
        f"no backup was taken, because {source} is {why}: stop the server and restore an earlier"
        " backup",
        file=str(source),
    )


def _write(path: Path, manifest: Manifest) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    path.chmod(0o600)
    sync(path)
    if read_manifest(path.parent) != manifest:
        raise StateCorrupted(
            f"{path} does not read as it was written; check its disk", file=str(path)
        )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a backup.

    StateDirectory if this is no backup; StateCorrupted if it is damaged or newer than
    this program.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
        kind = msgspec.json.decode(data, type=_Kind)
    except FileNotFoundError:
        raise StateDirectory(f"{folder} is not a backup: it has no {MANIFEST}") from None
    except OSError as error:
        raise StateDirectory(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StateCorrupted(
            f"{path} is not a manifest ({error}); use another backup", file=str(path)
        ) from None
    if kind.format != FORMAT:
        raise StateDirectory(
            f"{folder} is not a backup of Holdfast: {MANIFEST} says {kind.format!r}"
        )
    if kind.version > FORMAT_VERSION:
        raise StateCorrupted(
            f"{folder} was made by a newer Holdfast (format {kind.version}, this program knows"
            f" {FORMAT_VERSION}): restore it with that one",
            file=str(path),
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StateCorrupted(
            f"{path} is damaged ({error}); use another backup", file=str(path)
        ) from None
    if manifest.sealed().digest != manifest.digest:
        raise StateCorrupted(
            f"{path} is damaged: its digest is not its own; use another backup", file=str(path)
        )
    return manifest
