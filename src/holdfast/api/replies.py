"""Endpoints of native replies: start one, read its events from anywhere, cancel it."""

from __future__ import annotations

from urllib.parse import quote

from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call
from holdfast.api.reply_calls import (
    ResumedPieces,
    events_answer,
    owner_of,
    reply_headers,
    start_reply,
)
from holdfast.api.reply_schemas import NewReply
from holdfast.errors import InvalidMessage
from holdfast.streaming.dialects import native
from holdfast.streaming.reply import EntryId, parse_entry_id


async def create_reply(deps: ApiDeps, call: Call) -> Answer:
    reply, _ = await start_reply(deps, call, "native", native.read_request)
    ticket = deps.tickets.mint(reply.reply_id, call.principal)
    path = f"/v1/replies/{quote(reply.reply_id)}/events?ticket={ticket}"
    return Answer(NewReply(reply.reply_id, path), headers=reply_headers(reply))


async def read_reply_events(deps: ApiDeps, call: Call) -> Answer:
    """The events after Last-Event-ID; 204 if that is the end: EventSource stops."""
    reply = await deps.streaming.find(owner_of(call.principal), call.path["reply_id"])
    after = _last_event_id(call)
    if after is not None and after == reply.ended_at:
        return Answer(b"", status=204, headers=reply_headers(reply))
    return events_answer(deps, reply, ResumedPieces(reply, native.NativeEvents(), after))


def _last_event_id(call: Call) -> EntryId | None:
    """The header wins: a browser that reconnects repeats its first query."""
    written = call.headers.get("Last-Event-ID") or call.query.last_event_id
    if not written:
        return None
    after = parse_entry_id(written)
    if after is None:
        raise InvalidMessage("this is no id of an event", field="Last-Event-ID")
    return after


async def cancel_reply(deps: ApiDeps, call: Call) -> Answer:
    """Repeats, and cancels of what has ended, change nothing."""
    await deps.streaming.cancel(owner_of(call.principal), call.path["reply_id"])
    return Answer(b"", status=204)
