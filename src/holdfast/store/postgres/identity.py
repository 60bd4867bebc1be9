"""Which server a connection has reached, and what a change of it means. (Pure.)

A database remembers the server that it was last used on: its system identifier, and the
timeline of the write-ahead log it writes, which rises with each promotion. If a
connection finds another one, a standby was promoted or a backup restored, and commits
that clients have seen may be lost: all epochs must be raised before anything else is
read or written. The operator can promise that no failover loses a commit
(``lossless``): then only a lower base or timeline than before is refused.

An old primary that comes back finds itself unchanged. A node recognises it by what the
node has seen since.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

_Verdict = Literal["same", "changed", "old"]


class ServerIdentity(Struct, frozen=True):
    """A server, or what a database remembers of it."""

    system: str
    timeline: int


class EpochBase(Struct, frozen=True):
    """What the database remembers: its server, and the base of all epochs."""

    server: ServerIdentity
    base: int


class SeenServers:
    """What this node has seen so far, on any connection."""

    def __init__(self) -> None:
        self._timelines: dict[str, int] = {}
        self.base = 0

    def judge(self, server: ServerIdentity, stored: EpochBase) -> _Verdict:
        """``changed``: the database has to adopt the server first."""
        if server != stored.server:
            return "changed"
        timeline = self._timelines.get(server.system, 0)
        return "old" if stored.base < self.base or server.timeline < timeline else "same"

    def on_used(self, server: ServerIdentity, base: int) -> None:
        """A connection to this server is about to be used."""
        self._timelines[server.system] = server.timeline
        self.base = base
