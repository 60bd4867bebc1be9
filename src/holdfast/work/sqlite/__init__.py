"""Jobs in SQLite, for one process: in a file, and for ``memory`` without one.

``verbs``     what is done to the tables, inside a transaction of the caller's
``embedded``  the store and its one seat, over any way to run a transaction
``store``     that way for a file: one writer thread, one reader
"""

from holdfast.work.sqlite.store import WORK, SqliteWork

__all__ = ["WORK", "SqliteWork"]
