"""Backups of a node: what its state directory keeps, in the order that a restore can live with.

``work.db`` holds how far the log of ``chats.db`` was turned into jobs, so it is copied first: at worst a restored
server makes some jobs again, whose receivers know them by their ids. The other way round it would leave messages out.
``webhooks.db`` comes between: an endpoint that jobs name is then there, or was removed on purpose.

``access.db`` says who is cut off; a restore keeps the one that is there, so that it undoes no revocation.

``secrets.json`` stays out: who can read a backup must not be able to mint tokens. ``keys.json`` holds hashes only.
``rules.json`` is made from the rules.
"""

from __future__ import annotations

import asyncio
import getpass
from pathlib import Path

from holdfast import __version__
from holdfast.access.revocations.sqlite import ACCESS
from holdfast.access.secrets import KEYS_FILE
from holdfast.api.deps import Backup, BackupStep
from holdfast.clock import Clock, Ids, SystemClock, timestamp
from holdfast.drivers.sqlite.backup import Contents, Manifest, take
from holdfast.drivers.sqlite.file_copy import CopyProgress, Restored, quiet
from holdfast.drivers.sqlite.restore import renew, restore
from holdfast.errors import NotFound, ServerBusy, StateCorrupted, Unavailable, extra
from holdfast.limits.composition import RULES_NAME
from holdfast.limits.rulestore.sqlite import LIMITS
from holdfast.node.state_dir import held
from holdfast.store.sqlite import CHATS
from holdfast.webhooks.sqlite import WEBHOOKS
from holdfast.work.sqlite import WORK

FOLDER = "backups"
CONTENTS = Contents((WORK, WEBHOOKS, LIMITS, ACCESS, CHATS), plain=(KEYS_FILE,), derived=(RULES_NAME,))


def require_whole(state: Path) -> None:
    """StateCorrupted if files that were there are not: a start would make new ones and say that all is well.

    A first start makes them one after the other, so only the last may be empty because it was killed. That one is
    missing is possible only of ``chats.db``: the others may be in an engine of their own. ``access.db`` is not among
    them: servers that could not revoke had none (``revocations_file``).
    """
    names = [part.name for part in (CHATS, LIMITS, WORK, WEBHOOKS)]
    sizes = [_size(state / name) for name in names]
    for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
        later = [names[n] for n in range(place + 1, len(names)) if sizes[n]]
        if later and (size == 0 or (size is None and name == CHATS.name)):
            what = "empty" if size == 0 else "gone"
            raise StateCorrupted(
                f"{state / name} is {what}, but {', '.join(later)} beside it is not: put it back, "
                "run `holdfast restore` with a backup, or, to begin anew, move the other files away",
                file=str(state / name),
            )


def _size(path: Path) -> int | None:
    """How many bytes a database has, its log included; None: it is not there."""
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
        """What is being done now; None: nothing."""

    async def take(self) -> Backup:
        """A new backup, complete and checked. ServerBusy if one is being taken. It goes on if its caller does not."""
        if self.step is not None:
            raise ServerBusy(f"a backup is being taken ({self.step.doing}); wait for it", retry_after_seconds=5.0)
        self.step = BackupStep("starting", 0, 0)
        target = self._state / FOLDER / self._ids.new("backup-")
        taking = asyncio.ensure_future(asyncio.to_thread(self._take, target))
        taking.add_done_callback(self._done)
        manifest = await asyncio.shield(taking)
        return Backup(str(target), manifest.size_bytes, manifest.taken_at, manifest.files)

    def stop(self) -> None:
        """Give up what is being taken, so that nobody waits for it; it leaves nothing."""
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
            taking.exception()  # whoever waited has it


def restore_backup(
    state: Path, backup: Path, *, overwrite: bool, reason: str = "", progress: CopyProgress = quiet
) -> Manifest:
    """Put a backup in place of a stopped server's state, under new epochs; what it holds.

    StateDirectory if a server runs on the directory, or if there is state and ``overwrite`` is not said; see
    ``holdfast.drivers.sqlite.restore``.
    """
    with held(state) as directory:
        return restore(directory, backup, CONTENTS, _now(reason, backup), overwrite=overwrite, progress=progress)


def renew_rules(state: Path) -> Path:
    """The rules of a stopped server, which somebody put back by hand, under a new epoch; their file.

    StateDirectory if a server runs on the directory, NotFound if it keeps no rules.
    """
    with held(state) as directory:
        rules = directory / LIMITS.name
        if not rules.exists():
            raise NotFound(f"there is no {rules}; where the rules are in PostgreSQL, say so by limits.rules_url")
        renew(rules, LIMITS, _now("", rules))
        return rules


async def renew_shared_rules(rules_url: str) -> int:
    """The rules in a PostgreSQL that somebody put back from a copy, under a new epoch: which. Nodes may be running."""
    with extra("postgres"):
        from holdfast.limits.rulestore.postgres import PostgresRuleStore, PostgresSettings
    async with PostgresRuleStore(PostgresSettings(rules_url)) as store:
        await store.prepare()
        return await store.raise_epoch(int(SystemClock().now()))


def _now(reason: str, backup: Path) -> Restored:
    now = SystemClock().now()
    return Restored(timestamp(now), int(now), getpass.getuser(), reason, backup.name)
