"""The log as its readers get it: where it ends, and the entries past a position.

Its adapter is ``holdfast.eventlog.postgres``; see ``LogSource`` there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from holdfast.message import (
    AllEpochsRaised,
    ChatCreated,
    EpochRaised,
    LogEntry,
    LogEvent,
    Message,
)
from holdfast.store.postgres.server import ServerConnection


class LogEnds(NamedTuple):
    """The base of the epochs; of each shard the first position that is kept, and the
    last that is committed.
    """

    base: int
    firsts: Sequence[int]
    ends: Sequence[int]


class LogSlice(NamedTuple):
    """Entries, ascending in each shard. ``firsts``, ``reached``: of the shards that had
    any, also of kinds that this release does not know. ``is_whole``: nothing followed
    these when they were read.
    """

    base: int
    entries: Sequence[LogEntry]
    firsts: Mapping[int, int]
    reached: Mapping[int, int]
    unknown: int
    is_whole: bool


RETAINED = "Retained"
"""Keeps a position where the log's last messages were deleted; nothing to read."""

_EVENTS: Mapping[str, Callable[[Sequence[str], Sequence[int]], LogEvent]] = {
    "ChatCreated": lambda users, _: ChatCreated(tuple(users)),
    "EpochRaised": lambda _, numbers: EpochRaised(numbers[0]),
    "AllEpochsRaised": lambda _, numbers: AllEpochsRaised(numbers[0]),
}


async def log_ends(connection: ServerConnection) -> LogEnds:
    return LogEnds(*await connection.fetchrow("log_ends"))


async def log_lag(connection: ServerConnection, after: Sequence[int]) -> int:
    return int((await connection.fetchrow("log_lag", after))[0])


async def log_after(
    connection: ServerConnection, after: Sequence[int], limit: int
) -> LogSlice | None:
    """Up to ``limit`` entries past the positions ``after``; None if there are none."""
    rows = await connection.fetch("log_after", after, limit)
    if not rows:
        return None
    entries: list[LogEntry] = []
    firsts, reached, unknown = dict[int, int](), dict[int, int](), 0
    of_shard, begins, longest = -1, 0, 0
    # A node pays this for the messages of everybody: columns by place, all at once, and
    # what is of a shard once. Rows are in order of shard and position.
    for number, (
        shard, position, first, _base, _share, tenant, chat_id, epoch, event, users, numbers,
        message_id, sequence, kind, sender_id, client_id, content, content_type, created_at,
    ) in enumerate(rows):  # fmt: skip
        if shard != of_shard:
            longest = max(longest, number - begins)
            of_shard, begins = shard, number
            firsts[shard] = first
        reached[shard] = position
        what: Message | LogEvent
        if event is None:
            what = Message(
                message_id, chat_id, sequence, kind, sender_id, client_id, content, content_type,
                created_at,
            )  # fmt: skip
        elif event in _EVENTS:
            what = _EVENTS[event](users, numbers)
        else:
            unknown += event != RETAINED
            continue
        entries.append(LogEntry(shard, position, tenant, chat_id, epoch, what))
    longest = max(longest, len(rows) - begins)
    base, share = rows[0]["base"], rows[0]["share"]
    return LogSlice(
        base, entries, firsts, reached, unknown, is_whole=len(rows) < limit and longest < share
    )
