"""Holdfast: a real-time messaging server for people who must not lose a message.

The life of a message, one step a folder, in the order in which it happens:

1. ``wire``      turns bytes into typed frames, and frames into bytes          (pure)
2. ``gateway``   accepts sockets, authenticates, reads, writes, drains
3. ``session``   decides what this client may do next and what it is owed      (pure)
4. ``ingest``    admits, groups, makes durable, answers; owns every change of a chat
5. ``store``     the durable chat: numbers, keys, members, messages in one commit
6. ``eventlog``  the order on which every node agrees
7. ``fanout``    from the log to the sessions here and elsewhere, best effort
8. and out again through ``session``, ``gateway`` and ``wire`` to the client

Beside the path: ``api`` (REST over the same parts), ``client`` (the Python client), ``verify`` (the
promises as checkers), ``cli`` (the command line) and ``node`` (settings in, a running server out).

Everything speaks the values of ``message``, fails with the errors of ``errors``, and gets its time,
randomness and ids from ``clock``.
"""

__version__ = "0.1.0"
