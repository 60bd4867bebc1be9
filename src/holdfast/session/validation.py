"""Whether a frame makes sense by itself: the first of the refusals. (Pure.)

It checks what the types of the frames leave open: ids, sizes, limits. The store decides
membership, within the commit or the read itself.
"""

from __future__ import annotations

from typing import assert_never, get_args

from holdfast.errors import HoldfastError, InvalidContentType, InvalidMessage, MessageTooLarge
from holdfast.message import check_id
from holdfast.session.settings import SessionSettings
from holdfast.wire.frames import (
    Ack,
    AnyClientFrame,
    Authenticate,
    ContentType,
    HeartbeatAck,
    Read,
    Resume,
    ResumeBody,
    SendBody,
    SendMessage,
    SyncRequest,
    TypingStart,
    TypingStop,
)

CONTENT_TYPES = get_args(ContentType)
_BYTES_PER_CHARACTER_MAX = 4


def refusal_of(frame: AnyClientFrame, settings: SessionSettings) -> HoldfastError | None:
    """What is wrong with the frame, or None."""
    match frame:
        case SendMessage(payload=body):
            return refusal_of_send(body, settings.backpressure.inbound.max_message_size_bytes)
        case SyncRequest(payload=body):
            return _bad_id(body.chat_id, "chat_id") or _bad_limit(
                body.limit, settings.pages.max_messages
            )
        case (
            Ack(payload=body)
            | Read(payload=body)
            | TypingStart(payload=body)
            | TypingStop(payload=body)
        ):
            return _bad_id(body.chat_id, "chat_id")
        case Resume(payload=body):
            return _bad_resume(body, settings.pages.resume_chats_per_frame)
        case Authenticate(payload=body):
            return None if body.device_id is None else _bad_id(body.device_id, "device_id")
        case HeartbeatAck():
            return None
        case _:
            assert_never(frame)


def refusal_of_send(body: SendBody, bytes_max: int) -> HoldfastError | None:
    """What is wrong with a send, by WebSocket or REST; or None."""
    if check_id(body.chat_id, "chat_id") or check_id(body.client_message_id, "client_message_id"):
        return _bad_id(body.chat_id, "chat_id") or _bad_id(
            body.client_message_id, "client_message_id"
        )
    if body.content_type not in CONTENT_TYPES:
        return InvalidContentType(
            f"content_type must be one of {', '.join(CONTENT_TYPES)}", field="content_type"
        )
    if not body.content:
        return InvalidMessage("content must not be empty", field="content")
    if len(body.content) * _BYTES_PER_CHARACTER_MAX <= bytes_max:
        return None
    size = len(body.content.encode())
    if size > bytes_max:
        return MessageTooLarge(
            f"content is {size} bytes; at most {bytes_max} are allowed", limit=bytes_max
        )
    return None


def _bad_resume(body: ResumeBody, chats_max: int) -> HoldfastError | None:
    if len(body.cursors) > chats_max:
        return InvalidMessage(
            f"{len(body.cursors)} cursors in one frame; at most {chats_max} are allowed: "
            "send the rest in further frames, all but the last with more",
            field="cursors",
            limit=chats_max,
        )
    return next((bad for chat_id in body.cursors if (bad := _bad_id(chat_id, "cursors"))), None)


def _bad_id(value: str, name: str) -> HoldfastError | None:
    reason = check_id(value, name)
    return None if reason is None else InvalidMessage(reason, field=name)


def _bad_limit(value: int | None, limit_max: int) -> HoldfastError | None:
    if value is None or value <= limit_max:
        return None
    return InvalidMessage(f"limit is at most {limit_max}", field="limit", limit=limit_max)
