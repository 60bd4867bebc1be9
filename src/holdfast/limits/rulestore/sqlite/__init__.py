"""Rules in one SQLite file: ``limits.db`` in the state directory.

- ``store``  the file: one writer thread, one reader, notifications in this process
"""

from holdfast.limits.rulestore.sqlite.store import LIMITS, SqliteRuleStore

__all__ = ["LIMITS", "SqliteRuleStore"]
