"""Ingest: accepts sends, commits them in groups, and answers each exactly once.

- ``contract``       the seams: ``Sends`` in front, ``Durability`` behind
- ``admission``      asks limits before a send goes on
- ``intake``         the loops: groups are committed while the next ones gather
- ``send_queue``     the bounded queue of waiting sends, and how groups are cut (pure)
- ``durability``     the store behind a breaker and deadlines; raises epochs
- ``watermarks``     how far devices have received and read, written once a second
- ``erasure``        deletes a user's texts, memberships and devices
- ``expiry``         forgets old idempotency keys
- ``counter_check``  looks for damaged counters of chats to which nobody sends
"""
