"""The chats' file: its schema, how it is opened, and what a restore changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import apsw
import msgspec

from holdfast.drivers.sqlite import database
from holdfast.drivers.sqlite.database import Handle, SqliteSettings
from holdfast.drivers.sqlite.file_copy import Restored, StateFile
from holdfast.drivers.statements import migrations, statements
from holdfast.message import User
from holdfast.store.audit_chain import chained_record
from holdfast.store.commands import CommandContext

__all__ = [
    "CHATS",
    "SQL",
    "Handle",
    "SqliteSettings",
    "SqliteTuning",
    "open_and_migrate",
    "put_audit",
    "version_of",
]

SQL = statements("holdfast.store.sqlite")
MIGRATIONS = migrations("holdfast.store.sqlite")


@dataclass(frozen=True, slots=True)
class SqliteTuning:
    """What operators do not set; tests do."""

    migrations: Sequence[str] = tuple(MIGRATIONS)
    operations_between_looks: int = 5_000
    """SQLite checks the deadline after this many operations; a usual page takes fewer.
    """
    wipe_again_seconds: float = 1.0
    """How long to wait if a reader kept the write-ahead log from being emptied."""


def open_and_migrate(
    path: Path,
    settings: SqliteSettings,
    vfs: str | None = None,
    migrations: Sequence[str] = MIGRATIONS,
) -> apsw.Connection:
    """The writer's connection; see ``holdfast.drivers.sqlite.database``."""
    return database.open_and_migrate(path, settings, migrations, vfs)


def version_of(connection: apsw.Connection, path: Path) -> int:
    """The schema version of a chats file; see ``holdfast.drivers.sqlite.database``."""
    return database.version_of(connection, path, len(MIGRATIONS))


def put_audit(
    connection: apsw.Connection, act: CommandContext, action: str, target: str, details: str
) -> None:
    """Add to the audit log."""
    previous = connection.execute(SQL["last_audit_hash"], {"node": act.node}).get or ""
    record = chained_record(0, act, action, target, details, previous)
    connection.execute(SQL["put_audit"], msgspec.structs.asdict(record))


def _renew(connection: apsw.Connection, restored: Restored) -> None:
    """Raise all epochs: clients may have seen messages that the backup does not have,
    so they must drop every copy of a chat.
    """
    connection.execute(SQL["take_all_watermarks_along"], {"epoch_min": restored.epoch_min})
    connection.execute(SQL["raise_all_epochs"], {"epoch_min": restored.epoch_min})
    details = msgspec.json.encode(
        {"taken_at": restored.taken_at, "epoch_min": restored.epoch_min}
    ).decode()
    actor = User("", restored.actor)
    act = CommandContext(actor, restored.at, restored.act_id, reason=restored.reason)
    put_audit(connection, act, "store.restore", restored.backup, details)


CHATS = StateFile(
    name="chats.db",
    migrations=MIGRATIONS,
    counts={
        "chats": "SELECT count(*) FROM chats",
        "messages": "SELECT count(*) FROM messages",
        "log_end": SQL["log_end"],
    },
    renew=_renew,
)
"""The file as backups see it."""
