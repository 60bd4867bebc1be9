"""Chats in PostgreSQL (15 or newer), for many nodes.

- ``store``       the verbs of the contract; each is a CALL that commits, or a read
- ``append``      a group of sends as the arguments of one CALL, and its outcomes (pure)
- ``change``      a command: read, decide, and one CALL that writes the plan
- ``reads``       the reads, each in one snapshot
- ``log_reads``   the log: where it ends, and the entries past a position
- ``nodes``       node records, each name held by one connection
- ``leases``      one node at a time does what only one may do
- ``notifications`` that something was committed, from this node and to it
- ``connections`` lends connections; a write ends though its caller is gone
- ``server``      opens a connection and checks it before its first use
- ``identity``    which server this is, and what a change of it means (pure)
- ``schema``      creates the schema and brings it up to date
- ``errors``      the translation of PostgreSQL's errors
- ``functions``   what runs in the database; every write is a procedure of its own
- ``statements``  the SQL that the adapter sends
- ``migrations``  the schema
"""

from holdfast.store.postgres.server import PostgresStoreSettings
from holdfast.store.postgres.store import PostgresStore

__all__ = ["PostgresStore", "PostgresStoreSettings"]
