"""Endpoints that clients of OpenAI's API call: chat completions, models, responses."""

from __future__ import annotations

import asyncio

from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call
from holdfast.api.reply_calls import (
    YIELD_ENTRIES,
    EventPieces,
    ResumedPieces,
    events_answer,
    owner_of,
    reply_headers,
    start_reply,
    whole_answer,
)
from holdfast.api.reply_schemas import DeletedResponse, ModelList, ModelView
from holdfast.api.streaming import FailurePiece
from holdfast.errors import InvalidMessage, NotFound
from holdfast.streaming import sse
from holdfast.streaming.attached import AttachedReply
from holdfast.streaming.dialects import chat, responses, responses_request
from holdfast.streaming.dialects.openai_errors import error_body, error_object
from holdfast.streaming.reader import ReaderEvent


async def create_chat_completion(deps: ApiDeps, call: Call) -> Answer:
    reply, asked = await start_reply(deps, call, "chat", chat.read_request)
    if asked.stream:
        pieces = EventPieces(reply, chat.ChatEvents(asked.shown))
        return events_answer(deps, reply, pieces)
    return whole_answer(deps, reply, chat.ChatAnswer())


async def list_models(deps: ApiDeps, call: Call) -> Answer:
    return Answer(ModelList([ModelView(name) for name in deps.streaming.models()]))


async def get_model(deps: ApiDeps, call: Call) -> Answer:
    name = call.path["model_id"]
    if name not in deps.streaming.models():
        raise NotFound(f"there is no model {name!r} here; see GET /v1/models", model=name)
    return Answer(ModelView(name))


async def create_response(deps: ApiDeps, call: Call) -> Answer:
    reply, asked = await start_reply(deps, call, "responses", responses_request.read_request)
    if asked.stream:
        pieces = EventPieces(reply, responses.ResponseEvents(reply.reply_id))
        return events_answer(deps, reply, pieces)
    if asked.background:
        return await _shown(reply)
    return whole_answer(deps, reply, responses.ResponseAnswer(reply.reply_id))


async def get_response(deps: ApiDeps, call: Call) -> Answer:
    """The response as it is now, or its events from any number on."""
    reply = await _found(deps, call)
    after = call.query.starting_after
    if not call.query.stream:
        if after is not None:
            raise InvalidMessage("starting_after is for stream=true", field="starting_after")
        with deps.streaming.reading_whole(reply.begin.owner):
            return await _shown(reply)
    events = responses.ResponseEvents(reply.reply_id, -1 if after is None else after)
    return events_answer(deps, reply, ResponsePieces(reply, events))


class ResponsePieces(ResumedPieces):
    """The later events of a response; an error if it ends before those."""

    def __init__(self, reply: AttachedReply, events: responses.ResponseEvents) -> None:
        super().__init__(reply, events)
        self._events = events

    def _piece(self, event: ReaderEvent) -> bytes:
        piece = super()._piece(event)
        if piece or not self._events.ended_too_early:
            return piece
        last = self._events.next_number - 1
        beyond = InvalidMessage(f"the last event has the number {last}", field="starting_after")
        shown = error_object(400, beyond.message, "invalid_message", "starting_after")
        return FailurePiece.of(sse.event(error_body(shown)), beyond)


async def cancel_response(deps: ApiDeps, call: Call) -> Answer:
    """Repeats, and cancels of what has ended, change nothing."""
    reply = await _found(deps, call)
    with deps.streaming.reading_whole(reply.begin.owner):
        await deps.streaming.cancel(reply.begin.owner, reply.reply_id)
        return await _shown(reply, status=None if reply.ended_at else "cancelled")


async def delete_response(deps: ApiDeps, call: Call) -> Answer:
    reply = await _found(deps, call)
    await deps.streaming.delete(owner_of(call.principal), reply.reply_id)
    return Answer(DeletedResponse(reply.reply_id))


async def _found(deps: ApiDeps, call: Call) -> AttachedReply:
    found = deps.streaming.find(owner_of(call.principal), call.path["reply_id"])
    reply = await found
    if reply.begin.surface != "responses":
        raise NotFound("there is no such response")
    return reply


async def _shown(reply: AttachedReply, status: str | None = None) -> Answer:
    """The response as far as its entries go, put together in steps."""
    snapshot = await reply.snapshot()
    answer = responses.ResponseAnswer(reply.reply_id)
    for at in range(0, len(snapshot.entries), YIELD_ENTRIES):
        answer.add(snapshot.entries[at : at + YIELD_ENTRIES])
        await asyncio.sleep(0)
    status = status or ("queued" if snapshot.waiting else None)
    return Answer(answer.body(status), headers=reply_headers(reply))
