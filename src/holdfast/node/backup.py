"""Backups of a node: which files of the state directory are copied, and in which order.

``work.db`` holds how far the log of ``chats.db`` was turned into jobs, so it is copied
first: at worst a restored server makes some jobs again, and receivers recognise them by
their ids. In the other order it would leave messages out. ``webhooks.db`` is copied in
between: an endpoint that jobs name is then there, or was removed on purpose.

``access.db`` holds the revocations; a restore keeps the existing file, so that it
undoes no revocation.

``secrets.json`` is left out: reading a backup must not be enough to mint tokens.
``keys.json`` holds only hashes. ``rules.json`` is derived from the rules.
"""

from __future__ import annotations

import asyncio
import getpass
from pathlib import Path

from holdfast import __version__
from holdfast.access.secrets import KEYS_FILE
from holdfast.api.deps import Backup, BackupStep
from holdfast.clock import Clock, Ids, SystemClock, timestamp
from holdfast.drivers.sqlite.backup import Contents, Manifest, take
from holdfast.drivers.sqlite.file_copy import CopyProgress, Restored, quiet
from holdfast.drivers.sqlite.restore import renew, restore
from holdfast.errors import (
    NotFound,
    ServerBusy,
    StateCorrupted,
    StateDirectory,
    Unavailable,
    extra,
)
from holdfast.limits.composition import RULES_NAME
from holdfast.limits.rulestore.sqlite import LIMITS
from holdfast.node.engines import FILES
from holdfast.node.state_dir import held
from holdfast.store.sqlite import CHATS
from holdfast.webhooks.sqlite import WEBHOOKS
from holdfast.work.sqlite import WORK

FOLDER = "backups"
CONTENTS = Contents(FILES, plain=(KEYS_FILE,), derived=(RULES_NAME,))


def require_whole(state: Path) -> None:
    """StateCorrupted if a file was lost: a start would silently make an empty one.

    A first start makes the files one after the other, so after a kill only the last may
    be empty. Only ``chats.db`` is always there: the others may be in an engine of their
    own. ``access.db`` is not checked here, because servers before revocations have none
    (``revocations_file``).
    """
    names = [file.name for file in (CHATS, LIMITS, WORK, WEBHOOKS)]
    sizes = [_size(state / name) for name in names]
    for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
        later = [names[n] for n in range(number + 1, len(names)) if sizes[n]]
        if later and (size == 0 or (size is None and name == CHATS.name)):
            what = "empty" if size == 0 else "gone"
            raise StateCorrupted(
                f"{state / name} is {what}, but {', '.join(later)} beside it is not: put it back, "
                "run `holdfast restore` with a backup, or, to start empty, move the other files"
                " elsewhere",
                file=str(state / name),
            )


def require_no_chats(state: Path) -> None:
    """StateDirectory if a node of a cluster starts where an embedded server has chats:
    they would seem to be lost.
    """
    if _size(state / CHATS.name):
        raise StateDirectory(
            f"{state / CHATS.name} has the chats of a server without cluster.postgres, where this"
            " node would not find them: give the node a state directory of its own"
            " (server.state_dir), or take cluster.postgres out"
        )


def _size(path: Path) -> int | None:
    """The bytes of a database with its log; None if there is none."""
    files = [file for file in (path, path.with_name(path.name + "-wal")) if file.exists()]
    return sum(file.stat().st_size for file in files) if path.exists() else None


class Backups:
    """Takes backups of a running node's state directory, one at a time."""

    def __init__(self, state: Path, clock: Clock, ids: Ids) -> None:
        self._state = state
        self._clock = clock
        self._ids = ids
        self._stopping = False
        self.step: BackupStep | None = None
        """The step of the running backup; None if none runs."""

    async def take(self) -> Backup:
        """Take a backup; complete and checked on return. ServerBusy if one is running.

        It goes on if the caller is cancelled.
        """
        if self.step is not None:
            raise ServerBusy(
                f"a backup is being taken ({self.step.doing}); wait for it", retry_after_seconds=5.0
            )
        self.step = BackupStep("starting", 0, 0)
        target = self._state / FOLDER / self._ids.new("backup-")
        taking = asyncio.ensure_future(asyncio.to_thread(self._take, target))
        taking.add_done_callback(self._done)
        manifest = await asyncio.shield(taking)
        return Backup(str(target), manifest.size_bytes, manifest.taken_at, manifest.files)

    def stop(self) -> None:
        """Abort a running backup without a trace: a shutdown does not wait for it."""
        self._stopping = True

    def _take(self, target: Path) -> Manifest:
        at = timestamp(self._clock.now())
        return take(self._state, target, CONTENTS, at=at, program=__version__, progress=self._note)

    def _note(self, doing: str, done: int, in_all: int) -> None:
        if self._stopping:
            raise Unavailable("the server is stopping; take the backup again when it is back")
        self.step = BackupStep(doing, done, in_all)

    def _done(self, taking: asyncio.Future[Manifest]) -> None:
        self.step = None
        if not taking.cancelled():
            taking.exception()  # the caller has it


def restore_backup(
    state: Path, backup: Path, *, overwrite: bool, reason: str = "", progress: CopyProgress = quiet
) -> Manifest:
    """Restore a backup over a stopped server's state, under new epochs.

    StateDirectory if a server runs on the directory, or if there is state and
    ``overwrite`` is not set; see ``holdfast.drivers.sqlite.restore``.
    """
    with held(state) as directory:
        return restore(
            directory,
            backup,
            CONTENTS,
            _now(reason, backup),
            overwrite=overwrite,
            progress=progress,
        )


def renew_rules(state: Path) -> Path:
    """Put the rules of a stopped server under a new epoch; returns their file.

    For rules that an operator restored by hand. StateDirectory if a server runs on the
    directory, NotFound if it keeps no rules.
    """
    with held(state) as directory:
        rules = directory / LIMITS.name
        if not rules.exists():
            raise NotFound(
                f"there is no {rules}; where the rules are in PostgreSQL, say so by"
                " limits.rules_url"
            )
        renew(rules, LIMITS, _now("", rules))
        return rules


async def renew_shared_rules(rules_url: str) -> int:
    """Put the rules in a restored PostgreSQL under a new epoch, and return it.

    Nodes may be running.
    """
    with extra("postgres"):
        from holdfast.limits.rulestore.postgres import PostgresRuleStore, PostgresSettings
    async with PostgresRuleStore(PostgresSettings(rules_url)) as store:
        await store.prepare()
        return await store.raise_epoch(int(SystemClock().now()))


def _now(reason: str, backup: Path) -> Restored:
    clock = SystemClock()
    now, actor, act_id = clock.now(), getpass.getuser(), Ids(clock).new("aud_")
    return Restored(timestamp(now), int(now), actor, reason, backup.name, act_id=act_id)
