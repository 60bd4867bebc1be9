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

Beside the path:

- ``limits``    who may do how much: rules changed live, asked at every entrance
- ``work``      jobs that survive failure, in order, once: outbox, inbox, leases, dead letters
- ``webhooks``  signed side effects: a reader of the event log that makes jobs
- ``api``       REST over the same parts; ``access`` says who is asking and what they may do
- ``client``    the Python client; ``cli`` the command line
- ``verify``    the promises as checkers, faults and drills
- ``node``      ``settings`` in, a running server out; the only part that chooses adapters

Everything speaks the values of ``message``, fails with the errors of ``errors``, gets its time, randomness and ids
from ``clock``, tells what it does through ``telemetry``, and keeps its files through ``sqlite``; ``drivers`` is what
adapters of one technology share.
"""

__version__ = "0.1.0"
