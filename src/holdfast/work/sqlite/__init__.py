"""Jobs in SQLite, for one process: in a file, and for ``memory`` without one.

``verbs``     what is done to the tables, inside a transaction of the caller's
``embedded``  the store and its one seat, over any way to run a transaction
``store``     that way for a file: one writer thread, one reader
"""

from holdfast.work.sqlite.store import SqliteWork
from holdfast.work.sqlite.verbs import MIGRATIONS

__all__ = ["MIGRATIONS", "SqliteWork"]
