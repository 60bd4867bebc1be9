"""The embedded rules: one SQLite file, ``limits.db`` in the state directory."""

from holdfast.limits.rulestore.sqlite.store import SqliteRuleStore, raise_epoch

__all__ = ["SqliteRuleStore", "raise_epoch"]
