"""Leases: one node at a time does what only one may do.

- ``contract``  the seam: acquire, renew, release; fences
- ``held``      keeps a lease, and stops in time when it cannot
- ``memory``    for the nodes of one process
"""
