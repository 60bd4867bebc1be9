"""Settings in, a running server out.

It starts from the storage outwards and stops from the sockets inwards:

    port → state directory → engines → ingest → fanout → gateway → HTTP

- ``lifecycle``         starts a node, serves until a signal, drains
- ``huge_pages``        the heap of a started node in huge pages
- ``engines``           the composition root: chooses and opens every adapter
- ``between_nodes``     registry, bus and leases: what nodes know of each other by
- ``cluster_record``    what a node tells the others of itself
- ``cluster_view``      all nodes and what they share, as one of them sees it
- ``database_connections``  how many connections of PostgreSQL a node may take
- ``shared_state``      opens credentials, revocations, endpoints and dead letters
- ``node``              connects the parts of the message path
- ``work``              connects jobs and webhooks
- ``streaming``         connects the parts of AI replies
- ``alerts``            judges alerts over the node's metrics and reports them
- ``status``            what ``/admin/status`` begins with, and how it asks its parts
- ``store_watch``       looks whether an idle or restarted store serves
- ``readiness``         whether a node can serve: what each role needs (pure)
- ``supervisor``        restarts what runs beside the sockets
- ``state_dir``         the state directory and its lock
- ``doctor``            grades a deployment
- ``banner``            what an operator reads at the start
- ``backup``            backups and restores of a state directory
- ``revocations_file``  opens ``access.db``, or says that it was lost
- ``recovery``          repairs of a stopped server: admin key, lost revocations
- ``jwks_fetch``        fetches the keys of token issuers, within bounds
"""
