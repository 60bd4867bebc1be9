"""Node records: which nodes of a cluster live, and what each of them is.

- ``contract``  the seam: join under a name, renew, list; what the nodes share
- ``memory``    of a node that is alone
"""
