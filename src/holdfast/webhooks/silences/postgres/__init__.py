"""Silences of all nodes of a cluster, in PostgreSQL.

- ``store``  the verbs; ``statements.sql`` and ``migrations`` hold the SQL
"""

from holdfast.webhooks.silences.postgres.store import PostgresSilences

__all__ = ["PostgresSilences"]
