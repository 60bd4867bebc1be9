"""Dead letters of all nodes of a cluster, in PostgreSQL.

- ``store``  the verbs; ``statements.sql`` and ``migrations`` hold the SQL
"""

from holdfast.fanout.dead_letters.postgres.store import PostgresDeadLetters

__all__ = ["PostgresDeadLetters"]
