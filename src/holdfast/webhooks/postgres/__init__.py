"""Webhook endpoints and the log of their deliveries, for all nodes of a cluster.

- ``store``  the verbs; ``statements.sql`` and ``migrations`` hold the SQL
"""

from holdfast.webhooks.postgres.store import PostgresEndpoints

__all__ = ["PostgresEndpoints"]
