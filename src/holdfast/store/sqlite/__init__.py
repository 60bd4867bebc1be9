"""The embedded store: one SQLite file, one writer thread, a few readers.

``store``       the verbs: what goes to the writer, what to the readers
``append``      a group of sends in one commit
``change``      a command in one commit
``reads``       what the readers answer
``database``    its file, on ``holdfast.drivers.sqlite``
``migrations``  the schema, one file per version; ``statements.sql`` every statement by name
"""

from holdfast.store.sqlite.database import CHATS, SqliteSettings
from holdfast.store.sqlite.store import SqliteStore

__all__ = ["CHATS", "SqliteSettings", "SqliteStore"]
