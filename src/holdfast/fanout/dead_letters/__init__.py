"""Events that cannot be used, kept for an operator so that reading can go on.

- ``contract``  a dead letter, what a store of them promises, and when to alert
- ``recent``    in memory
- ``sqlite``    in the file of the chats
- ``postgres``  of all nodes of a cluster
"""

from holdfast.fanout.dead_letters.contract import (
    DATA_BYTES_MAX,
    DeadLetter,
    DeadLetters,
    DeadLetterSettings,
    overview,
)
from holdfast.fanout.dead_letters.recent import RecentDeadLetters

__all__ = [
    "DATA_BYTES_MAX",
    "DeadLetter",
    "DeadLetterSettings",
    "DeadLetters",
    "RecentDeadLetters",
    "overview",
]
