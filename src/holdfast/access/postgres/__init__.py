"""Credentials of a cluster: API keys in PostgreSQL, token keys in a file on each node.

- ``store``  the verbs, and what a start checks; ``statements.sql``, ``migrations``: SQL
"""

from holdfast.access.postgres.store import PostgresCredentials

__all__ = ["PostgresCredentials"]
