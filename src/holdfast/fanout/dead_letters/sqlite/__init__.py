"""Dead letters in the file of the chats.

- ``store``  the verbs; ``statements.sql`` has the SQL. The table is in the schema of
  ``store/sqlite``.
"""

from holdfast.fanout.dead_letters.sqlite.store import SqliteDeadLetters

__all__ = ["SqliteDeadLetters"]
