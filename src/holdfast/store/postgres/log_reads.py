"""The log as its readers get it: where it ends, and the entries past a position.

Its adapter is ``holdfast.eventlog.postgres``; see ``LogSource`` there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
    any, also of kinds that this release does not know.
    """

    base: int
    entries: Sequence[LogEntry]
    firsts: Mapping[int, int]
    reached: Mapping[int, int]
    unknown: int


RETAINED = "Retained"
"""Keeps a position where the log's last messages were deleted; nothing to read."""

_EVENTS: Mapping[str, Callable[[Any], LogEvent]] = {
    "ChatCreated": lambda row: ChatCreated(tuple(row["users"])),
    "EpochRaised": lambda row: EpochRaised(row["numbers"][0]),
    "AllEpochsRaised": lambda row: AllEpochsRaised(row["numbers"][0]),
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
    for row in rows:
        shard = row["shard"]
        firsts[shard], reached[shard] = row["first_position"], row["position"]
        what = _what(row)
        if what is not None:
            place = (shard, row["position"], row["tenant"], row["chat_id"], row["epoch"])
            entries.append(LogEntry(*place, what))
        elif row["event"] != RETAINED:
            unknown += 1
    return LogSlice(rows[0]["base"], entries, firsts, reached, unknown)


def _what(row: Any) -> Message | LogEvent | None:
    if row["event"] is not None:
        made = _EVENTS.get(row["event"])
        return made(row) if made is not None else None
    return Message(
        row["message_id"],
        row["chat_id"],
        row["sequence"],
        row["kind"],
        row["sender_id"],
        row["client_message_id"],
        row["content"],
        row["content_type"],
        row["created_at"],
    )
