"""Jobs in PostgreSQL (13 or newer), for many processes.

- ``store``       the jobs, the operators' acts on them, and the schema's migration
- ``encoding``    reports and claims as SQL arguments, jobs from rows (pure)
- ``session``     one worker's session: its partitions, its calls, its wake-ups
- ``sweep``       how a reader misses no row of a transaction that commits late (pure)
- ``heartbeat``   the worker's heartbeat, from a thread of its own
- ``errors``      the translation of PostgreSQL's errors
- ``functions``   what runs in the database; ``process`` is the one round trip
- ``statements``  the SQL that the adapter sends
- ``migrations``  the schema
"""

from holdfast.work.postgres.session import WorkerSessionSettings
from holdfast.work.postgres.store import PostgresWork

__all__ = ["PostgresWork", "WorkerSessionSettings"]
