"""The bus: notifications between nodes that are worthless a moment later.

- ``contract``  the seam, and every kind of notification
- ``batches``   gathers notifications for one payload, and reads payloads
- ``memory``    for the nodes of one process
- ``redis``     for all nodes, by PUBLISH
- ``postgres``  for all nodes without Redis, by NOTIFY
"""
