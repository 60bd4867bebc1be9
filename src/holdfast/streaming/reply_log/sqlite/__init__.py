"""``replies.db``: the log of replies of one node, and the usage rows of every node.

- ``file``        opens the file, ends what the last process left, deletes what expired
- ``store``       the log of replies
- ``usage``       the usage rows
- ``statements``  their SQL
- ``migrations``  the schema
"""

from holdfast.streaming.reply_log.sqlite.file import REPLIES, RepliesFile
from holdfast.streaming.reply_log.sqlite.store import SqliteReplyLog
from holdfast.streaming.reply_log.sqlite.usage import SqliteUsage

__all__ = ["REPLIES", "RepliesFile", "SqliteReplyLog", "SqliteUsage"]
