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
from holdfast.errors import InvalidMessage, NotFound
from holdfast.streaming import sse
from holdfast.streaming.dialects import native
from holdfast.streaming.parts import FIND_SECONDS
from holdfast.streaming.reader import GAP
from holdfast.streaming.reply import EntryId, parse_entry_id

TICKET_PATIENCE_SECONDS = 20.0
"""How long a failing log is asked again for a ticket: EventSource gives up for good at
the first 503, and a failover of Redis takes several seconds."""


async def create_reply(deps: ApiDeps, call: Call) -> Answer:
    reply, _ = await start_reply(deps, call, "native", native.read_request)
    ticket = deps.tickets.mint(reply.reply_id, call.principal)
    path = f"/v1/replies/{quote(reply.reply_id)}/events?ticket={ticket}"
    return Answer(NewReply(reply.reply_id, path), headers=reply_headers(reply))


async def read_reply_events(deps: ApiDeps, call: Call) -> Answer:
    """The events after Last-Event-ID; 204 if that is the end: EventSource stops."""
    has_ticket = call.query.ticket is not None
    patience_seconds = TICKET_PATIENCE_SECONDS if has_ticket else FIND_SECONDS
    owner, reply_id = owner_of(call.principal), call.path["reply_id"]
    try:
        reply = await deps.streaming.find(owner, reply_id, patience_seconds)
    except NotFound:
        if not has_ticket:
            raise
        return _gone(reply_id)
    after = _last_event_id(call)
    if after is not None and after == reply.end_shown_at:
        return Answer(b"", status=204, headers=reply_headers(reply))
    return events_answer(deps, reply, ResumedPieces(reply, native.NativeEvents(), after))


def _gone(reply_id: str) -> Answer:
    """The ticket proves that its reader's reply existed, so its log was lost or has
    expired. An event says so: EventSource shows nothing of a 404.
    """
    failed = native.NativeEvents().fail(GAP)
    return Answer(failed, headers={"X-Reply-Id": reply_id}, media_type=sse.MEDIA_TYPE)


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
