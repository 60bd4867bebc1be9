"""Token counts by day, tenant, user, model and provider.

- ``contract``  what a store of usage promises
- ``memory``    the same in memory
- ``buffer``    the node's side: counts wait here while the store fails
"""
