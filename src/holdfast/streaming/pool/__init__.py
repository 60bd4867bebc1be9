"""Active generations and the queue for them, across nodes.

- ``contract``  what a pool answers, in batches
- ``memory``    the pool of one node
- ``redis``     the pool of all nodes; ``lua/pool.lua`` decides
- ``places``    what a node has in the pool
- ``leases``    the node's side: batches, heartbeats, confirmations, fallback
"""
