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

from collections.abc import Mapping, Sequence
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
        self._read: dict[int, int] = {}
        """How far the log was read, by shard, under this base."""
        self.base = 0

    def judge(self, server: ServerIdentity, stored: EpochBase) -> _Verdict:
        """``changed``: the database has to adopt the server first.

        A promotion counts from the moment it is seen. To adopt its server may take
        until that has a standby, and the old primary may be back before.
        """
        highest = max(server.timeline, self._timelines.get(server.system, 0))
        self._timelines[server.system] = highest
        if server.timeline < highest:
            return "old"
        if server != stored.server:
            return "changed"
        return "old" if stored.base < self.base else "same"

    def on_used(self, base: int) -> None:
        """A connection to a database with this base is about to be used."""
        if base != self.base:
            self._read.clear()
        self.base = base

    def on_read(self, base: int, reached: Mapping[int, int]) -> None:
        """The log was read up to these positions, by shard."""
        if base == self.base:
            for shard, position in reached.items():
                self._read[shard] = max(position, self._read.get(shard, 0))

    def is_lost(self, ends: Sequence[int]) -> bool:
        """Whether something was read that is not in a log with these ends.

        Ask before the server is used: its next positions may be past the lost ones.
        """
        return any(position > ends[shard] for shard, position in self._read.items())
