"""The reference store: everything in memory, on one event loop; not durable.

It is the model for the contract tests and the store of the simulation.

- ``store``    the verbs of the contract, over all chats
- ``records``  the audit log and the answers under idempotency keys
- ``chat``     one chat with everything that belongs to it
"""

from holdfast.store.memory.store import MemoryStore

__all__ = ["MemoryStore"]
