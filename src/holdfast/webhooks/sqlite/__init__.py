"""Endpoints in one SQLite file: ``store`` the verbs, ``statements.sql`` and ``migrations`` their SQL."""

from holdfast.webhooks.sqlite.store import MIGRATIONS, SqliteEndpoints

__all__ = ["MIGRATIONS", "SqliteEndpoints"]
