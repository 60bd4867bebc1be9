"""Revocations in PostgreSQL, for all nodes of a cluster.

- ``store``  the verbs; ``statements.sql`` and ``migrations`` hold the SQL
"""

from holdfast.access.revocations.postgres.store import PostgresRevocations

__all__ = ["PostgresRevocations"]
