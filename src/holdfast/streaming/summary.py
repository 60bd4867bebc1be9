"""A reply as operators see it: whose, where, how far; never its text. (Pure.)"""

from __future__ import annotations

from msgspec import Struct

from holdfast.streaming.reply import ReplyBegin


class ReplySummary(Struct, frozen=True):
    """One reply. ``readers``, ``entries`` and ``position`` are known only at the node
    that makes it, and 0 elsewhere.
    """

    reply_id: str
    tenant: str
    owner: str
    owner_kind: str
    kind: str
    surface: str
    model: str
    state: str
    age_seconds: float
    node: str
    readers: int = 0
    entries: int = 0
    position: int = 0
    """Its place in the queue; 0 if it does not wait."""


def summarize(reply_id: str, begin: ReplyBegin, state: str, now: float) -> ReplySummary:
    return ReplySummary(
        reply_id,
        begin.owner_tenant,
        begin.owner_name,
        begin.owner_kind,
        begin.kind,
        begin.surface,
        begin.model,
        state,
        round(now - begin.created_at, 1),
        begin.node,
    )
