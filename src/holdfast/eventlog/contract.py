"""The order on which every node agrees. Adapters: memory, sqlite (the message table in commit order).

Positions rise in commit order; between two entries of one chat nothing of that chat is missing. Reading is
at-least-once: a reader owns its position and moves it after it has acted; the log keeps none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.message import LogEntry


class EventLog(Protocol):
    """The reading side."""

    async def end(self) -> int:
        """The position of the newest entry; 0 if there is none."""
        ...

    async def read(self, after: int, limit: int) -> Sequence[LogEntry]:
        """Up to ``limit`` entries with position > ``after``, in order; empty if there is none yet.

        Unavailable if the log cannot be read now. UnreadableEvent if the first of them cannot be decoded; one that
        is not the first ends what is returned, so that the next read meets it.
        """
        ...

    async def wait(self, after: int) -> None:
        """Return when an entry past ``after`` may exist; cancel-safe. It may return early, never late."""
        ...
