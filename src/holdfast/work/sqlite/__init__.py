"""Jobs in SQLite, for one process: in a file, or in memory for tests.

- ``verbs``       what each verb does to the tables, inside the caller's transaction
- ``embedded``    the store and its one session, over any way to run a transaction
- ``store``       that way for a file (one writer thread, one reader) and for memory
- ``session_lock``   the lock that admits one worker process per file
- ``statements``  the SQL of the verbs
- ``migrations``  the schema
"""

from holdfast.work.sqlite.store import WORK, SqliteWork

__all__ = ["WORK", "SqliteWork"]
