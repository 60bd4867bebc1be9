"""What a log of replies promises.

A *log* holds the entries of one reply, dense within an epoch. Only the node that makes
the reply writes to it. An append names the entry it continues; if the log does not end
there, nothing is written and the answer says where it ends. So a repeated append
writes nothing twice, and an append of an older epoch writes nothing at all.

A living log is never trimmed. It is deleted 30 minutes after its begin or, once it has
its end, 10 minutes after that. A log at its bounds ends with ``gap``: the reply goes
on, but nobody can resume it.

The log also keeps *key claims*: which reply an owner's Idempotency-Key began. A claim
is deleted with its log.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

from holdfast.streaming.reply import EntryId, Owner, ReplyBegin, ReplyEntry

LOG_BYTES_MAX = 1 << 20
"""Of one reply. Beyond it the reply goes on, and a resume ends with ``gap``."""
LOG_ENTRIES_MAX = 32_000
BEGUN_SECONDS = 30 * 60.0
ENDED_SECONDS = 10 * 60.0
FOLLOW_SECONDS = 1.0
"""A follower gets a page at least this often."""


class LogEnded(Exception):
    """The log has its end, so no epoch begins."""


class KeyClaim(NamedTuple):
    """An owner's Idempotency-Key, the reply it began, and the node that makes it."""

    owner: Owner
    key: str
    body_hash: bytes
    reply_id: str
    node: str


class LogAppend(NamedTuple):
    """Entries that continue the entry before ``first`` of this epoch."""

    reply_id: str
    first: EntryId
    entries: Sequence[ReplyEntry]


class Appended(NamedTuple):
    """``last``: the log's last entry after the call; None: there is no log.

    If it is not the last entry of the append, nothing was written.
    """

    last: EntryId | None
    bytes_stored: int = 0


class LogPage(NamedTuple):
    """A part of a log. ``last``: the log's last entry, maybe beyond the page."""

    entries: Sequence[tuple[EntryId, ReplyEntry]]
    last: EntryId


class ReplyLog(Protocol):
    """Every method raises Unavailable (nothing was done) or OutcomeUnknown.

    ``shared``: other nodes read and write the same log. ``flush_seconds``: how often a
    node appends what its replies have grown by.
    """

    shared: bool
    flush_seconds: float

    async def begin(self, reply_id: str, begin: ReplyBegin) -> int:
        """Begin an epoch with entry 0 and return it: the time in milliseconds, and
        above the last epoch of this log. LogEnded if the log has its end.
        """
        ...

    async def append(self, appends: Sequence[LogAppend]) -> Sequence[Appended]:
        """One call for all replies of a node; each append alone is all or nothing."""
        ...

    async def read(self, reply_id: str, after: EntryId | None, entries_max: int) -> LogPage | None:
        """Entries after ``after`` (None: from the begin of the last epoch) in order;
        None if there is no log.
        """
        ...

    def follow(self, reply_id: str, after: EntryId | None) -> AsyncGenerator[LogPage, None]:
        """Pages as the log grows, one at least every second (maybe empty), until the
        caller stops. Ends when there is no log (any more). While a shared log is
        unavailable its pages are empty.
        """
        ...

    async def delete(self, reply_ids: Sequence[str]) -> None: ...

    async def claim(self, claim: KeyClaim) -> KeyClaim:
        """Put if absent: the claim that is in force now, this one or an earlier."""
        ...

    async def free(self, claim: KeyClaim) -> None:
        """Remove the claim if it still names this reply."""
        ...

    async def forget_owner(self, owner: Owner) -> int:
        """Delete every log and claim of an owner (erasure); returns how many logs."""
        ...

    async def close(self) -> None: ...
