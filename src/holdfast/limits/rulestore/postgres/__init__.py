"""Rules in PostgreSQL: changes go to the primary, nodes read the primary or a replica.

- ``connection``     the statements and locks, and the rule reader
- ``store``          the primary: changes, and everything an operator reads
- ``notifications``  LISTEN on the primary; the follower that republishes to Redis
"""

from holdfast.drivers.postgres_database import PostgresSettings
from holdfast.limits.rulestore.postgres.connection import PostgresRuleReader
from holdfast.limits.rulestore.postgres.notifications import LogFollower, PostgresNotifications
from holdfast.limits.rulestore.postgres.store import PostgresRuleStore

__all__ = [
    "LogFollower",
    "PostgresNotifications",
    "PostgresRuleReader",
    "PostgresRuleStore",
    "PostgresSettings",
]
