"""Holdfast: a real-time messaging server for people who must not lose a message.

The life of a message, one step a folder, in the order in which it happens:

1. ``wire``      turns bytes into typed frames, and frames into bytes         (pure)
2. ``gateway``   accepts sockets, authenticates, reads, writes, drains
3. ``session``   decides what a client may do and what it gets next          (pure)
4. ``ingest``    admits, groups, makes durable, answers; owns every change of a chat
5. ``store``     the durable chat: numbers, keys, members, messages in one commit
6. ``eventlog``  the order on which every node agrees
7. ``fanout``    from the log to the sessions here and elsewhere, best effort
8. and out again through ``session``, ``gateway`` and ``wire`` to the client

Beside the path:

- ``history``   reads of chats for sessions and REST, within bounds
- ``limits``    who may do how much: rules changed live, asked at every entry point
- ``work``      jobs that survive failure, in order, once: outbox, inbox, leases
- ``webhooks``  signed side effects: a reader of the event log that makes jobs
- ``streaming``  AI replies over SSE: a fair queue, leases, a log to resume from
- ``api``       REST over the same parts
- ``access``    who is asking, and what they may do
- ``client``    the Python client
- ``cli``       the command line
- ``verify``    the promises as checkers over a recorded history
- ``node``      builds a running server from ``settings`` and chooses its adapters

Shared by all of them:

- ``message``     the frozen values that every part passes on
- ``errors``      the one error tree
- ``clock``       time, randomness and ids, so that a simulation can own them
- ``bounds``      checks of settings that are bounds
- ``resilience``  breaker, backoff, token bucket
- ``settings``    file, environment, options as one tree; refuses removed settings
- ``telemetry``   metrics, log lines, traces
- ``drivers``     what the adapters of one technology share: SQLite, PostgreSQL, Redis
"""

__version__ = "0.1.0"
