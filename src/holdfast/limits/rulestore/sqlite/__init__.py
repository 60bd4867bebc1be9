"""The embedded rules: one SQLite file, ``limits.db`` in the state directory."""

from holdfast.limits.rulestore.sqlite.store import LIMITS, SqliteRuleStore

__all__ = ["LIMITS", "SqliteRuleStore"]
