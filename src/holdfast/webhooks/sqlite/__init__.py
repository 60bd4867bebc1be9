"""Endpoints in one SQLite file: ``store`` the verbs, ``statements.sql`` and ``migrations`` their SQL."""

from holdfast.webhooks.sqlite.store import WEBHOOKS, SqliteEndpoints

__all__ = ["WEBHOOKS", "SqliteEndpoints"]
