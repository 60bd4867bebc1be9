"""Jobs in PostgreSQL (13 or newer), for many processes.

``store``      the jobs and the acts upon them; brings the schema up to date
``seat``       a worker's place: its partitions, its calls, its sleep
``sweep``      how nothing is lost of transactions that commit late                (pure)
``heartbeat``  a worker's sign of life, from a thread of its own
``errors``     what PostgreSQL's errors mean here
``functions``  what runs in the database, first of all ``process``, the one round trip
"""

from holdfast.work.postgres.session import WorkerSessionSettings
from holdfast.work.postgres.store import PostgresWork

__all__ = ["PostgresWork", "WorkerSessionSettings"]
