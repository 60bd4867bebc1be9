"""Entries in one SQLite file: ``store`` the verbs, ``statements.sql`` and ``migrations`` their SQL."""

from holdfast.access.revocations.sqlite.store import ACCESS, SqliteRevocations

__all__ = ["ACCESS", "SqliteRevocations"]
