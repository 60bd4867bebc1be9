"""Jobs that survive failure, in order, once: an outbox and an inbox with leases, retries and dead letters.

Read ``job`` first (what a job is and what is decided when it fails), then ``contract`` (the seam), ``streams``
(what waits, and behind what), ``announcing`` (what may start now), ``destinations`` (how much one destination may use),
``coordinator`` (a worker's life), ``shift`` (its time on one seat), ``worker_task`` (what a handler cannot cancel),
``runners`` and ``running`` (a job's run), ``watchdog`` (a stuck loop) and one adapter: ``memory``, ``sqlite`` or
``postgres``.
"""
