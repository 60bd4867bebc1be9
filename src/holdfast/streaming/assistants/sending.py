"""Sends the message of a reply as the assistant.

Its ``client_message_id`` is the reply's id, so it is stored once, however often it is
sent. Rates and outages only delay it.
"""

from __future__ import annotations

import asyncio

from holdfast.clock import Clock
from holdfast.errors import Deferred, KeyReused, NotAMember, NotFound, OutcomeUnknown
from holdfast.ingest.contract import Sends
from holdfast.message import Acked, Outcome, User
from holdfast.streaming.assistants.jobs import AssistantNotice
from holdfast.streaming.assistants.scene import Unwanted
from holdfast.wire.frames import SendBody

CONTENT_TYPE = "text/markdown"
DEADLINE_SECONDS = 5.0
"""Of one send."""
SENDING_SECONDS = 60.0
"""How long it is sent again while the store or a rate defers it."""
AGAIN_SECONDS = 1.0
WAIT_SECONDS_MAX = 10.0


async def send_message(sends: Sends, clock: Clock, notice: AssistantNotice, content: str) -> None:
    """Return when the message is stored. Raises Unwanted, or why it cannot be."""
    body = SendBody(notice.reply_id, notice.chat_id, content, CONTENT_TYPE)
    sender = User(notice.tenant, notice.assistant)
    give_up_at = clock.monotonic() + SENDING_SECONDS
    while True:
        match await _submit(sends, clock, body, sender):
            case Acked() | KeyReused():
                return  # an earlier run may have sent it, with another text
            case NotAMember() | NotFound():
                raise Unwanted("the assistant has left")
            case (Deferred() | OutcomeUnknown()) as refusal if clock.monotonic() < give_up_at:
                wait = refusal.retry_after_seconds or AGAIN_SECONDS
                await asyncio.sleep(min(wait, WAIT_SECONDS_MAX))
            case refusal:
                raise refusal


async def _submit(sends: Sends, clock: Clock, body: SendBody, sender: User) -> Outcome:
    answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def answer(outcome: Outcome) -> None:
        if not answered.done():
            answered.set_result(outcome)

    deadline = clock.monotonic() + DEADLINE_SECONDS
    sends.submit(body, sender, body.client_message_id, deadline, answer)
    return await answered
