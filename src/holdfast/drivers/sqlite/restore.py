"""Puts a backup in place of a state directory's files: all of it, or nothing.

No file system renames several files at once, so a restore has two steps. It first
prepares everything in a folder beside the state: copies the files, compares them with
the manifest, migrates and renews them. Then one rename marks that folder as ready, and
from there the restore only goes forward: it moves the old files aside and the new ones
in. If the process is killed after the rename, the next one that locks the directory
goes on (``finish``); before the rename, nothing has happened.

Replaced files are moved aside, not deleted, so that an operator can undo the restore of
a wrong backup.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import apsw
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast import telemetry
from holdfast.drivers.files import sync
from holdfast.drivers.sqlite.backup import Contents, Manifest, read_manifest
from holdfast.drivers.sqlite.database import SqliteSettings, open_and_migrate
from holdfast.drivers.sqlite.errors import Doing, translate
from holdfast.drivers.sqlite.file_copy import (
    CopyProgress,
    Restored,
    StateFile,
    cannot,
    copy_file,
    describe,
    quiet,
)
from holdfast.errors import StateCorrupted, StateDirectory

PARTIAL = "restore.partial"
READY = "restore.ready"
NEW = "new"
PLAN = "plan.json"
SQLITE_MAGIC = b"SQLite format 3\x00"


class RestorePlan(Struct, frozen=True):
    """What a ready restore has to do: move ``moves`` aside, bring ``brings`` in."""

    moves: list[str]
    brings: list[str]
    aside: str
    """The name of the folder that keeps the replaced files."""


class BackupSource(Struct, frozen=True):
    """A backup and the path of each of its files."""

    manifest: Manifest
    files: dict[str, Path]


def restore(
    state: Path,
    backup: Path,
    contents: Contents,
    restored: Restored,
    *,
    overwrite: bool,
    progress: CopyProgress = quiet,
) -> Manifest:
    """Put a backup in place and return what was restored. Blocks.

    The caller holds the lock of ``state``. Raises OperatorErrors and leaves ``state``
    as it was if the backup is damaged, foreign or newer than this program, if there are
    files to replace without ``overwrite``, or if the disk fails. Existing plain files
    and ``kept`` databases stay: a restore of messages must not restore old permissions.
    """
    source = open_backup(backup, contents)
    restored = replace(restored, taken_at=source.manifest.taken_at)
    present = [part.name for part in contents.parts if (state / part.name).exists()]
    if present and not overwrite:
        raise StateDirectory(
            f"{state} is not empty ({', '.join(present)}): name another --state-dir, "
            "or say --overwrite; what is there is then moved aside"
        )
    partial = state / PARTIAL
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / NEW).mkdir(mode=0o700, parents=True)
        try:
            made = _make_ready(source, partial, state, contents, restored, progress)
            telemetry.mark("restore.made")
            partial.rename(state / READY)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        sync(state)
        telemetry.mark("restore.ready")
        finish(state)
    except OSError as error:
        raise cannot(f"{backup} cannot be restored to {state}", error) from error
    return made


def open_backup(backup: Path, contents: Contents) -> BackupSource:
    """The manifest and files of a backup, not yet checked.

    Also accepts the single file that older versions made.
    """
    if backup.is_dir():
        manifest = read_manifest(backup)
        names = [file.name for file in manifest.files]
        known = {*(part.name for part in contents.parts), *contents.plain}
        if missing := [name for name in names if not (backup / name).is_file()]:
            raise StateCorrupted(f"{backup} lacks {', '.join(missing)}; use another backup")
        if unknown := [name for name in names if name not in known]:
            raise StateCorrupted(
                f"{backup} holds {', '.join(unknown)}, which this program does not know"
            )
        if contents.needed.name not in names:
            raise StateCorrupted(
                f"{backup} was made without {contents.needed.name}; use another backup"
            )
        return BackupSource(manifest, {name: backup / name for name in names})
    if not backup.exists():
        raise StateDirectory(f"there is no backup {backup}")
    with backup.open("rb") as file:
        if file.read(len(SQLITE_MAGIC)) != SQLITE_MAGIC:
            raise StateCorrupted(
                f"{backup} is not a backup: give the folder that `holdfast backup` printed"
            )
    needed = contents.needed
    copied = replace(describe(backup, needed), name=needed.name)
    return BackupSource(Manifest("", 0, "", "", (copied,)), {needed.name: backup})


def _make_ready(
    source: BackupSource,
    partial: Path,
    state: Path,
    contents: Contents,
    restored: Restored,
    progress: CopyProgress,
) -> Manifest:
    brought = []
    for entry in source.manifest.files:
        part = contents.part(entry.name)
        if (part is None or part.kept) and (state / entry.name).exists():
            continue
        staged = partial / NEW / entry.name
        copy_file(source.files[entry.name], staged, progress)
        if describe(staged, part, progress) != entry:
            raise StateCorrupted(
                f"{source.files[entry.name]} is not what its manifest says; use another backup"
            )
        if part is not None:
            renew(staged, part, restored)
        sync(staged)
        telemetry.mark(f"restore.made.{entry.name}")
        brought.append(entry)
    plan = RestorePlan(
        list(_replaced(contents, state)),
        [entry.name for entry in brought],
        _aside(state, restored.at),
    )
    (partial / PLAN).write_bytes(msgspec.json.encode(plan))
    for made in (partial / PLAN, partial / NEW, partial):
        sync(made)
    return replace(source.manifest, files=tuple(brought))


def _replaced(contents: Contents, state: Path) -> Iterator[str]:
    """Every file that a restore moves aside.

    A database's log comes before its database: left behind, it would be applied to the
    new one.
    """
    for part in contents.parts:
        if part.kept and (state / part.name).exists():
            continue
        yield from (f"{part.name}-wal", f"{part.name}-shm", part.name)
    yield from contents.derived


def _aside(state: Path, at: str) -> str:
    """A name that is free."""
    name = "before-restore-" + at.replace(":", "").replace("-", "")
    return next(
        free for n in count() if not (state / (free := f"{name}-{n}" if n else name)).exists()
    )


def renew(path: Path, part: StateFile, restored: Restored) -> None:
    """Migrate a copy that nobody has open, and mark it as restored."""
    connection = open_and_migrate(path, SqliteSettings(), part.migrations)
    try:
        with connection:
            part.renew(connection, restored)
        connection.pragma("journal_mode", "DELETE")  # one file, complete in itself
    except apsw.Error as error:
        raise translate(error, str(path), Doing.OPENING) from error
    finally:
        connection.close(True)


def finish(state: Path) -> None:
    """Complete a restore that is ready, if there is one. Raises OSError.

    It may be killed anywhere and called again. The caller holds the lock of ``state``.
    """
    ready = state / READY
    if not ready.exists():
        return
    if (ready / PLAN).exists():
        plan = msgspec.json.decode((ready / PLAN).read_bytes(), type=RestorePlan)
        for name in plan.moves:
            _put(state, ready, name, brings=name in plan.brings)
        for name in [name for name in plan.brings if name not in plan.moves]:
            _put(state, ready, name, brings=True)
        sync(ready)
        sync(state)
        shutil.rmtree(ready / NEW, ignore_errors=True)
        if any(left.name != PLAN for left in ready.iterdir()):
            ready.rename(state / plan.aside)
            sync(state)
            return
    shutil.rmtree(ready)
    sync(state)


def _put(state: Path, ready: Path, name: str, *, brings: bool) -> None:
    """Move one old file aside and the new one in.

    A new file that has left the ready folder is in place.
    """
    staged = ready / NEW / name
    if brings and not staged.exists():
        return
    if (state / name).exists():
        (state / name).rename(ready / name)
    telemetry.mark(f"restore.aside.{name}")
    if brings:
        staged.rename(state / name)
        telemetry.mark(f"restore.placed.{name}")
