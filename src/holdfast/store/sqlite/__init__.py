"""The embedded store: one SQLite file, one writer thread, a few readers.

- ``store``           the verbs of the contract; runs each on the writer or on a reader
- ``append``          a group of sends in one commit
- ``change``          a command in one commit, and the other writes
- ``reads``           the reads, each in one snapshot with a deadline
- ``database``        the file, on ``holdfast.drivers.sqlite``
- ``migrations``      the schema, one file per version
- ``statements.sql``  every statement, by name
"""

from holdfast.store.sqlite.database import CHATS, SqliteSettings, SqliteTuning
from holdfast.store.sqlite.store import SqliteStore

__all__ = ["CHATS", "SqliteSettings", "SqliteStore", "SqliteTuning"]
