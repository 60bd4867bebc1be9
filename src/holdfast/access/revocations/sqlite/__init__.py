"""Revocations in one SQLite file.

- ``store``  the verbs; ``statements.sql`` and ``migrations`` hold the SQL
"""

from holdfast.access.revocations.sqlite.store import ACCESS, SqliteRevocations

__all__ = ["ACCESS", "SqliteRevocations"]
