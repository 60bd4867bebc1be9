"""Replies that outlive their connection or their node.

- ``contract``       what a log of replies promises
- ``open_logs``      what a node knows of the logs that it writes (pure)
- ``local_follow``   following a log that only this process writes
- ``memory``         the log in memory
- ``sqlite``         the log of one node, in ``replies.db``
- ``redis``          the log of many nodes, in Redis
- ``stream_follow``  following many Redis Streams over one connection
- ``writer``         the node's side: writes what its replies have grown by
"""
