"""The reference store: everything in memory, on one event loop; nothing survives the process.

It is the model for the contract suite and the store of the simulation.

``store``  the verbs, over all chats
``chat``   one chat with all that belongs to it
"""

from holdfast.store.memory.store import MemoryStore

__all__ = ["MemoryStore"]
