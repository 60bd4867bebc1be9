"""Background jobs: an outbox and an inbox with order per stream, leases, retries and
dead letters.

- ``job``             what a job is; when a failed job is retried, and when it is dead
- ``inspection``      jobs, dead letters and counts as operators see them
- ``contract``        the seam: what a job store and a worker's session promise
- ``outbox``          enqueue a job, or receive a message, in the caller's transaction
- ``handlers``        handlers, their registration and their context
- ``chat_transport``  the transport that posts a job's payload to a chat
- ``settings``        how a worker runs
- ``worker``          a worker: joins the store, works, leaves, joins again
- ``worker_loop``     one session: lease partitions, claim, report
- ``reports``         a report in pieces, so that one refused job can be isolated
- ``streams``         the jobs in memory, and what each of them waits for
- ``dispatch``        which waiting job may start next
- ``destinations``    how many runners and how much memory one destination may use
- ``runners``         the tasks that run handlers, and their replacement
- ``runner``          one run of one job, and the verdict on it
- ``failures``        from an exception to a reason
- ``breakers``        one circuit breaker per job type
- ``worker_task``     tasks that a handler cannot cancel
- ``watchdog``        ends a process whose event loop is stuck
- ``sqlite``          jobs in a SQLite file or in memory, for one process
- ``postgres``        jobs in PostgreSQL, for many processes
"""
