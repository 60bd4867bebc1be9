"""The registry in PostgreSQL, for a cluster without Redis.

- ``store``           the adapter: one statement for each call
- ``statements.sql``  its statements
- ``migrations/``     its unlogged tables, and the functions that change them
"""

from holdfast.fanout.registry.postgres.store import PostgresRegistry

__all__ = ["PostgresRegistry"]
