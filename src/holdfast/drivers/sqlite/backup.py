"""A backup: a folder with a copy of every file of a state directory, and a manifest that proves it whole.

Each file is one snapshot of itself; no two are of the same moment. ``parts`` are therefore copied in the order given,
and that order decides what a restore may find: a file that points into another is copied before it, so that it lags
behind (work is done again) and never runs ahead (work would be left out).

The folder appears under its name only when everything in it is on stable storage and was read back and checked.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.drivers.files import sync
from holdfast.drivers.sqlite import points
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
    """What a backup says of itself. ``digest`` is over everything else in it."""

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
        """With its digest."""
        digest = hashlib.sha256(msgspec.json.encode(replace(self, digest=""))).hexdigest()
        return replace(self, digest=digest)


class _Kind(Struct, frozen=True):
    """As much of a manifest as every version of it has."""

    format: str
    version: int


class Contents(Struct, frozen=True):
    """What a state directory keeps: databases in the order in which they are copied, and plain files.

    The last database is the one the others point into: without it there is no backup. ``derived`` files are made from
    them, and go with them.
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
    state: Path, target: Path, contents: Contents, *, at: str, program: str, progress: CopyProgress = quiet
) -> Manifest:
    """Copy what is in ``state`` into the new folder ``target``, while its server runs.

    Blocks; one at a time per ``target``'s folder, whose leftovers of backups that were killed are removed. Raises
    OperatorErrors; then there is no folder.
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
            points.checkpoint("backup.complete")
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        sync(target.parent)
    except OSError as error:
        raise cannot(f"the backup {target} cannot be written", error) from error
    return manifest


def _copy_all(state: Path, folder: Path, contents: Contents, progress: CopyProgress) -> tuple[CopiedFile, ...]:
    files = []
    for part in contents.parts:
        if (state / part.name).exists():
            copy_database(state / part.name, folder / part.name, progress)
            files.append(_described(state / part.name, folder / part.name, part, progress))
            points.checkpoint(f"backup.{part.name}")
        elif part is contents.needed:
            raise _useless(state / part.name, "gone")
    for name in contents.plain:
        if (state / name).exists():
            copy_file(state / name, folder / name, progress)
            files.append(describe(folder / name, None, progress))
    return tuple(files)


def _described(source: Path, copy: Path, part: StateFile, progress: CopyProgress) -> CopiedFile:
    """A copy that was just made, checked; if it is damaged, then so is what it was made of."""
    try:
        return describe(copy, part, progress)
    except StateCorrupted as error:
        raise _useless(source, "damaged") from error


def _useless(source: Path, why: str) -> StateCorrupted:
    return StateCorrupted(
        f"no backup was taken, because {source} is {why}: stop the server and restore an earlier backup",
        file=str(source),
    )


def _write(path: Path, manifest: Manifest) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    path.chmod(0o600)
    sync(path)
    if read_manifest(path.parent) != manifest:
        raise StateCorrupted(f"{path} does not read as it was written; check its disk", file=str(path))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a backup. StateDirectory: this is none; StateCorrupted: it is damaged, or newer than this."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
        kind = msgspec.json.decode(data, type=_Kind)
    except FileNotFoundError:
        raise StateDirectory(f"{folder} is not a backup: it has no {MANIFEST}") from None
    except OSError as error:
        raise StateDirectory(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StateCorrupted(f"{path} is not a manifest ({error}); use another backup", file=str(path)) from None
    if kind.format != FORMAT:
        raise StateDirectory(f"{folder} is not a backup of Holdfast: {MANIFEST} says {kind.format!r}")
    if kind.version > FORMAT_VERSION:
        raise StateCorrupted(
            f"{folder} was made by a newer Holdfast (format {kind.version}, this program knows {FORMAT_VERSION}): "
            "restore it with that one",
            file=str(path),
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StateCorrupted(f"{path} is damaged ({error}); use another backup", file=str(path)) from None
    if manifest.sealed().digest != manifest.digest:
        raise StateCorrupted(f"{path} is damaged: its digest is not its own; use another backup", file=str(path))
    return manifest
