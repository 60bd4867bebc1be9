"""Settings in, a running server out.

It starts from the storage outwards and stops from the sockets inwards:

    port → state directory → engines → ingest → fanout → gateway → HTTP

- ``lifecycle``         starts a node, serves until a signal, drains
- ``engines``           the composition root: chooses and opens every adapter
- ``between_nodes``     registry, bus and leases: what nodes know of each other by
- ``shared_state``      opens credentials, revocations, endpoints and dead letters
- ``node``              connects the parts of the message path
- ``work``              connects jobs and webhooks
- ``streaming``         connects the parts of AI replies
- ``supervisor``        restarts what runs beside the sockets
- ``state_dir``         the state directory and its lock
- ``banner``            what an operator reads at the start
- ``backup``            backups and restores of a state directory
- ``revocations_file``  opens ``access.db``, or says that it was lost
- ``recovery``          repairs of a stopped server: admin key, lost revocations
- ``jwks_fetch``        fetches the keys of token issuers, within bounds
"""
