"""The chats' own file: its schema, and how it is opened."""

from __future__ import annotations

from pathlib import Path

import apsw

from holdfast.sqlite import database
from holdfast.sqlite.database import Handle, SqliteSettings
from holdfast.sqlite.statements import migrations, statements

__all__ = ["SQL", "Handle", "SqliteSettings", "open_and_migrate", "version_of"]

SQL = statements("holdfast.store.sqlite")
MIGRATIONS = migrations("holdfast.store.sqlite")


def open_and_migrate(path: Path, settings: SqliteSettings, vfs: str | None = None) -> apsw.Connection:
    """The writer's connection; see ``holdfast.sqlite.database``."""
    return database.open_and_migrate(path, settings, MIGRATIONS, vfs)


def version_of(connection: apsw.Connection, path: Path) -> int:
    """The schema version of a chats file; see ``holdfast.sqlite.database``."""
    return database.version_of(connection, path, len(MIGRATIONS))
