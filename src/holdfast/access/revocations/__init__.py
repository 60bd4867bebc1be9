"""Who is cut off: revoked tokens, users, devices and tenants, and the users banned or muted in a whole tenant.

- ``contract``  an entry, and what a store of them promises
- ``memory``    the store as a value of one process
- ``sqlite``    the store in a file, ``access.db``
- ``in_force``  the entries a node holds in memory, and what they refuse

Bans and mutes in one chat are no entries here: they are in the chat's own commit (``store.changes``).
"""
