"""Active generations and the queue for them, across nodes.

- ``contract``  what a pool answers, in batches
- ``memory``    the pool of one node
- ``places``    what a node has in the pool
- ``leases``    the node's side: batches, heartbeats, confirmations, fallback
"""
