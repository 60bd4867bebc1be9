"""Native replies: ``/v1/replies``, made for EventSource. (Pure.)

Every event but ``queued`` has its entry's id, so a browser that reconnects continues
behind the last event it got. ``delta`` has the provider's chunk as it came. The failure
is called ``failed``, because ``error`` is EventSource's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from holdfast.streaming import sse
from holdfast.streaming.dialects import chat
from holdfast.streaming.dialects.contract import DialectRequest
from holdfast.streaming.dialects.request_body import invalid
from holdfast.streaming.reply import (
    EntryId,
    ReplyBegin,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
    ReplyUsage,
    shown_id,
)


def read_request(fields: Mapping[str, Raw]) -> DialectRequest:
    """The request is that of a chat completion, without a choice of streaming."""
    for name in ("stream", "stream_options"):
        if name in fields:
            raise invalid(name, "has no meaning here: read events_url")
    return chat.read_request(fields)


class NativeEvents:
    """A reply as events with ids, from any entry on."""

    def render(self, entries: Sequence[tuple[EntryId, ReplyEntry]]) -> bytes:
        return b"".join([_event(entry_id, entry) for entry_id, entry in entries])

    def queued(self, position: int, eta_seconds: float | None) -> bytes:
        return _named("queued", {"position": position, "eta_seconds": eta_seconds})

    def fail(self, error: ReplyError) -> bytes:
        return _named("failed", _failure(error))


def _event(entry_id: EntryId, entry: ReplyEntry) -> bytes:
    match entry:
        case ReplyDelta(chunk=chunk):
            return sse.event(chunk, "delta", str(entry_id))
        case ReplyUsage():
            counts = {
                "prompt_tokens": entry.prompt_tokens,
                "completion_tokens": entry.completion_tokens,
                "estimated": entry.estimated,
            }
            return _named("usage", counts, entry_id)
        case ReplyError():
            return _named("failed", _failure(entry), shown_id(entry_id, entry))
        case ReplyDone():
            return _named("done", {}, entry_id)
        case ReplyBegin():
            return b""


def _failure(error: ReplyError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message}


def _named(name: str, data: Mapping[str, Any], entry_id: EntryId | None = None) -> bytes:
    return sse.event(msgspec.json.encode(data), name, str(entry_id) if entry_id else "")
