"""The registry: which devices of which users are connected to which gateways.

- ``contract``  the seam: registration, displacement, liveness, and the node records
- ``sweeper``   removes dead gateways, one node at a time
- ``memory``    for the gateways of one process
- ``redis``     for all nodes: one script
- ``postgres/`` for all nodes without Redis: unlogged tables
"""
