"""The event log: every committed message, in the order on which all readers agree.

- ``contract``  what a log promises to its readers
- ``memory``    the reference, used by the simulation
- ``postgres``  the log of many nodes: the store's tables, in shards
- ``sqlite``    the embedded log: the store's message table, with a tail in memory
"""
