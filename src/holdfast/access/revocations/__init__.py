"""Who is cut off: revoked tokens, users, devices, tenants; bans and mutes of a tenant.

- ``contract``  an entry, and what a store of entries promises
- ``memory``    the store in memory: the reference
- ``sqlite``    the store in a file, ``access.db``
- ``postgres``  the store of a cluster
- ``in_force``  the entries that a node holds in memory, and what they refuse

Bans and mutes of one chat are not here: they are part of the chat and change in its
own commit (``store.commands``).
"""
