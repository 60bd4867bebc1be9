"""Endpoints of messages: read, send, redact, and their delivery status."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from holdfast import telemetry
from holdfast.api.chats import act_of, commit
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call
from holdfast.api.schemas import DeliveryStatus, MessagePage, MessagesQuery, NewMessage
from holdfast.errors import (
    Forbidden,
    InvalidMessage,
    NotFound,
    OutcomeUnknown,
    RateLimited,
    Refused,
)
from holdfast.message import SEQUENCE_MAX, Acked, Chat, Outcome, Page, Watermark
from holdfast.session.responses import acknowledgement
from holdfast.session.validation import refusal_of_send
from holdfast.store.commands import Redact
from holdfast.wire.frames import SendBody

ANSWER_GRACE_SECONDS = 0.5
"""Ingest answers by the deadline; this guards against a case where it does not."""


async def list_messages(deps: ApiDeps, call: Call) -> Answer:
    query: MessagesQuery = call.query
    if sum(bound is not None for bound in (query.before, query.after, query.around)) > 1:
        raise InvalidMessage("give at most one of before, after and around")
    limit = min(query.limit or deps.pages.default_messages, deps.pages.max_messages)
    user = call.principal.user
    chat = await deps.history.ask(
        lambda store: store.chat(call.path["chat_id"], user), call.deadline, user
    )
    if query.around is not None:
        half = limit // 2
        older = await _before(deps, call, query.around, half) if half else None
        newer = await _after(deps, call, query.around - 1, limit - half)
        return Answer(_page(chat, older, newer, query.around - 1))
    if query.after is not None:
        return Answer(_page(chat, None, await _after(deps, call, query.after, limit), query.after))
    before = query.before or SEQUENCE_MAX
    return Answer(_page(chat, await _before(deps, call, before, limit), None, before - 1))


async def _before(deps: ApiDeps, call: Call, before: int, limit: int) -> Page:
    """The read itself checks the membership again: it may end between two reads."""
    chat_id, user, pages = call.path["chat_id"], call.principal.user, deps.pages
    return await deps.history.ask(
        lambda store: store.read_before(chat_id, before, limit, pages.max_bytes, user),
        call.deadline,
        user,
    )


async def _after(deps: ApiDeps, call: Call, after: int, limit: int) -> Page:
    chat_id, user, pages = call.path["chat_id"], call.principal.user, deps.pages
    return await deps.history.ask(
        lambda store: store.read_after(chat_id, after, limit, pages.max_bytes, user),
        call.deadline,
        user,
    )


def _page(chat: Chat, older: Page | None, newer: Page | None, after: int) -> MessagePage:
    """Join the pages read before and after the sequence ``after`` into one.

    For a side that was not read, the head and first sequence say whether there is more.
    """
    messages = [*(older.messages if older else ()), *(newer.messages if newer else ())]
    first = messages[0].sequence if messages else after + 1
    last = messages[-1].sequence if messages else after
    head = max(chat.head, *(page.head for page in (older, newer) if page))
    return MessagePage(
        chat_id=chat.chat_id,
        epoch=(newer or older or chat).epoch,
        head=head,
        messages=messages,
        has_older=older.has_more if older else min(first, head + 1) > chat.first_sequence,
        has_newer=newer.has_more if newer else last < head,
    )


async def send_message(deps: ApiDeps, call: Call) -> Answer:
    """The Idempotency-Key is the client_message_id.

    A retry gets the first answer, marked deduplicated.
    """
    body: NewMessage = call.body
    send = SendBody(call.key or "", call.path["chat_id"], body.content, body.content_type)
    if refusal := refusal_of_send(send, deps.content_bytes_max):
        telemetry.sends_refused()
        raise refusal
    outcome = await _submit(deps, call, send)
    if not isinstance(outcome, Acked):
        raise outcome
    return Answer(
        acknowledgement(send.client_message_id, outcome), 200 if outcome.deduplicated else 201
    )


def count_refused_send(error: Exception) -> None:
    """Count a send that never became one: availability is of all that reached the
    node.
    """
    if isinstance(error, Refused | RateLimited):
        telemetry.sends_refused()
    else:
        telemetry.send_turned_away("request")


async def _submit(deps: ApiDeps, call: Call, send: SendBody) -> Outcome:
    """Each request is its own source: concurrent requests of a user have no order."""
    answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def answer(outcome: Outcome) -> None:
        if not answered.done():
            answered.set_result(outcome)

    deps.sends.submit(send, call.principal.user, deps.ids.new("req_"), call.deadline, answer)
    try:
        async with asyncio.timeout(call.seconds_left + ANSWER_GRACE_SECONDS):
            return await answered
    except TimeoutError:
        return OutcomeUnknown("no answer in time; send it again with the same Idempotency-Key")


def _sequence(call: Call) -> int:
    value = call.path["sequence"]
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= SEQUENCE_MAX:
        raise NotFound("there is no such message")
    return int(value)


async def redact_message(deps: ApiDeps, call: Call) -> Answer:
    """The store decides by the role table: the sender, or an admin of the chat."""
    return await commit(
        deps, call, Redact(act_of(deps, call), call.path["chat_id"], _sequence(call))
    )


async def get_status(deps: ApiDeps, call: Call) -> Answer:
    """For the sender only, like receipts on the socket."""
    chat_id, user, sequence = call.path["chat_id"], call.principal.user, _sequence(call)
    page = await _after(deps, call, sequence - 1, 1)
    message = next((m for m in page.messages if m.sequence == sequence), None)
    if message is None:
        raise NotFound("there is no such message")
    if message.sender_id != user.user_id:
        raise Forbidden("only its sender sees who has a message")
    watermarks = await deps.history.ask(
        lambda store: store.watermarks(chat_id), call.deadline, call.principal.user
    )
    members = await deps.history.ask(
        lambda store: store.members(chat_id), call.deadline, call.principal.user
    )
    others = {member.user_id for member in members} - {user.user_id}
    delivered, read = _reached(watermarks, others, sequence)
    return Answer(DeliveryStatus(chat_id, page.epoch, sequence, delivered, read))


def _reached(
    watermarks: Iterable[Watermark], others: set[str], sequence: int
) -> tuple[list[str], list[str]]:
    """Who of ``others`` has ``sequence`` on a device, and who has read it."""
    theirs = [mark for mark in watermarks if mark.user.user_id in others]
    read = {mark.user.user_id for mark in theirs if mark.read >= sequence}
    delivered = {mark.user.user_id for mark in theirs if mark.delivered >= sequence} | read
    return sorted(delivered), sorted(read)
