"""The event log: the order on which every node agrees. Adapters: memory, sqlite.

Positions rise in commit order, and between two entries of one chat nothing of that chat
is missing. Reading is at-least-once: each reader keeps its own position and moves it
after it has acted; the log stores no positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from holdfast.message import LogEntry


class EventLog(Protocol):
    """The read side of the log."""

    async def end(self) -> int:
        """The position of the newest entry; 0 if there is none."""
        ...

    async def read(self, after: int, limit: int) -> Sequence[LogEntry]:
        """Up to ``limit`` entries with position > ``after``, in order; may be empty.

        Raises Unavailable if the log cannot be read now, and UnreadableEvent if the
        first entry cannot be decoded. An undecodable entry further on ends the result
        before it, so that the next read raises.
        """
        ...

    async def wait(self, after: int) -> None:
        """Return when an entry past ``after`` may exist. Cancel-safe.

        It may return early, never late.
        """
        ...


class CommitSource(Protocol):
    """What an embedded log needs from its store."""

    def on_commit(self, listener: Callable[[Sequence[LogEntry]], None]) -> None:
        """Call ``listener`` on the event loop after each commit, with the entries it
        added to the log.

        It is called with no entries when copies may be out of date: stored messages
        lost their content (redaction, retention), or the outcome of a write is unknown.
        In that case it is called when the write ends and again with the next write
        whose outcome is known.
        """
        ...

    async def log_end(self) -> int:
        """The position of the newest entry ever committed."""
        ...

    async def log_after(self, after: int, limit: int) -> Sequence[LogEntry]:
        """Up to ``limit`` entries past a position, in commit order."""
        ...
