"""Rules in PostgreSQL: changes on the primary, reading from it or from a replica, LISTEN/NOTIFY as a doorbell.

``store``      the primary: changes and everything an operator reads
``reader``     what a node follows: the primary, or a replica that may lag
``bell``       LISTEN on the primary
``follower``   publishes each change to Redis, one node of each region; updates the heartbeat row, one node of all
``connection`` connections, and what PostgreSQL's errors mean here
"""

from holdfast.limits.rulestore.postgres.connection import PostgresRuleReader, PostgresSettings
from holdfast.limits.rulestore.postgres.notifications import LogFollower, PostgresNotifications
from holdfast.limits.rulestore.postgres.store import PostgresRuleStore

__all__ = ["LogFollower", "PostgresNotifications", "PostgresRuleReader", "PostgresRuleStore", "PostgresSettings"]
