"""Every frame of protocol version 1, typed. (Pure.)

A frame is ``{"type": …, "request_id": …, "payload": {…}}``; a reply echoes
``request_id``, a push has none. Client frames are strict: unknown types, unknown fields
and wrong types are refused. The docstrings are the protocol reference: it is generated
from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from msgspec import UNSET, Meta, Struct, UnsetType, field

from holdfast.message import SEQUENCE_MAX, Message, Page

PROTOCOL_VERSION = 1
SUBPROTOCOL = "holdfast.v1"
BEARER_SUBPROTOCOL = "bearer."

ContentType = Literal["text/plain", "text/markdown"]
Number = Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]
"""An epoch or a sequence."""


class Body(Struct, frozen=True, forbid_unknown_fields=True):
    """A payload from a client."""


class Nothing(Body, frozen=True):
    """A payload without fields."""


class AuthenticateBody(Body, frozen=True):
    token: str
    device_id: str | None = None


class SendBody(Body, frozen=True):
    client_message_id: str
    chat_id: str
    content: str
    content_type: str = "text/plain"


class AckBody(Body, frozen=True):
    chat_id: str
    epoch: Number
    sequence: Number


class CursorClaim(NamedTuple):
    """What a client says it has: ``[epoch, sequence]``, or ``[epoch, sequence, proof]``
    with the proof of it.
    """

    epoch: Number
    sequence: Number
    proof: str | None = None


class ResumeBody(Body, frozen=True):
    cursors: dict[str, CursorClaim]
    more: bool = False


class SyncBody(Body, frozen=True):
    chat_id: str
    epoch: Number
    after_sequence: Number
    limit: Annotated[int, Meta(ge=1)] | None = None
    proof: str | None = None


class ChatBody(Body, frozen=True):
    chat_id: str


class ReadBody(Body, frozen=True):
    chat_id: str
    sequence: Number


class ClientFrame(
    Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, kw_only=True, gc=False
):
    """What a client may send."""

    request_id: str | None = None


class Authenticate(ClientFrame, frozen=True, tag="authenticate"):
    """The first frame where no header could carry the token; later, a new token before
    the old one expires.
    """

    payload: AuthenticateBody


class SendMessage(ClientFrame, frozen=True, tag="send_message"):
    """Send a message. ``client_message_id`` is the sender's own key: a retry under it
    is no second message.
    """

    payload: SendBody


class Ack(ClientFrame, frozen=True, tag="ack"):
    """This device has stored the chat up to ``sequence``, without a hole. No reply."""

    payload: AckBody


class Resume(ClientFrame, frozen=True, tag="resume"):
    """After connecting: how far this device has each chat; ``more`` but in the last."""

    payload: ResumeBody


class SyncRequest(ClientFrame, frozen=True, tag="sync_request"):
    """Pull what follows ``after_sequence``; ``limit`` messages at most."""

    payload: SyncBody


class HeartbeatAck(ClientFrame, frozen=True, tag="heartbeat_ack"):
    """The answer to ``heartbeat``. No reply."""

    payload: Nothing = field(default_factory=Nothing)


class TypingStart(ClientFrame, frozen=True, tag="typing_start"):
    """The user is typing; ends by itself after 10 seconds. No reply."""

    payload: ChatBody


class TypingStop(ClientFrame, frozen=True, tag="typing_stop"):
    """The user stopped typing. No reply."""

    payload: ChatBody


class Read(ClientFrame, frozen=True, tag="read"):
    """The user has read the chat up to ``sequence``. No reply."""

    payload: ReadBody


AnyClientFrame = (
    Authenticate
    | SendMessage
    | Ack
    | Resume
    | SyncRequest
    | HeartbeatAck
    | TypingStart
    | TypingStop
    | Read
)


class Payload(Struct, frozen=True, omit_defaults=True):
    """A payload to a client; ``type`` names its frame. Unknown fields are ignored."""

    type: ClassVar[str]


class ConnectionEstablished(Payload, frozen=True):
    """The connection is open. ``limits``: its own, by the names of their settings."""

    type = "connection_established"
    connection_id: str
    user_id: str
    device_id: str
    server_time: str
    heartbeat_interval_ms: int
    protocol_version: int
    limits: Mapping[str, float]


class Authenticated(Payload, frozen=True):
    """The refreshed token is accepted; without ``expires_in_ms`` it does not expire."""

    type = "authenticated"
    expires_in_ms: int | None = None


class MessageAck(Payload, frozen=True):
    """The message is on stable storage; ``deduplicated`` if it had been before."""

    type = "message_ack"
    client_message_id: str
    message_id: str
    chat_id: str
    sequence: int
    created_at: str
    deduplicated: bool


class ResumedChat(Struct, frozen=True):
    """One chat that moved: its first page."""

    chat_id: str
    epoch: int
    head: int
    messages: Sequence[Message]
    through: int
    has_more: bool
    reset: bool
    proof: str | UnsetType = UNSET


class Resumed(Payload, frozen=True):
    """The chats that moved, those joined and those gone, in at most 256 KiB.

    Chats that do not fit are named in ``resync`` frames right behind it; all others
    have not moved.
    """

    type = "resumed"
    chats: Sequence[ResumedChat]
    joined: Sequence[str]
    gone: Sequence[str]


class ChatHead(Struct, frozen=True):
    """A chat and its highest sequence."""

    chat_id: str
    head: int


class Resync(Payload, frozen=True):
    """I did not send you everything; sync from your cursor."""

    type = "resync"
    chats: Sequence[ChatHead]


class Heartbeat(Payload, frozen=True):
    """Are you there? ``heads`` are the (epoch, head) of chats in which this connection
    is behind, 500 at most; the others are named in the next ones, which come soon.
    """

    type = "heartbeat"
    heads: Mapping[str, tuple[int, int]]


class Typing(Payload, frozen=True):
    """Somebody is typing, or stopped."""

    type = "typing"
    chat_id: str
    user_id: str
    active: bool


class Presence(Payload, frozen=True):
    """Somebody came or went."""

    type = "presence"
    user_id: str
    status: Literal["online", "offline"]
    last_seen: str


class Receipt(Payload, frozen=True):
    """How far somebody has stored and read a chat; only to the senders."""

    type = "receipt"
    chat_id: str
    user_id: str
    delivered: int
    read: int


class ReplyTextDelta(Payload, frozen=True):
    """A reply of an assistant grows: the text of its entries `from` up to `to`, without
    `to`. It follows the text that you have if you have the entries before `from`.
    """

    type = "reply_delta"
    chat_id: str
    reply_id: str
    epoch: int
    from_entry: int = field(name="from")
    to_entry: int = field(name="to")
    text: str


ReplyTextStatus = Literal["running", "done", "failed"]


class ReplyTextState(Payload, frozen=True):
    """A reply of an assistant so far: replaces the text that you have of it.

    It is the first frame of a reply and its last, and comes where you missed something
    or the reply began again (a higher `epoch`). `from` above 0: only the last part, 48
    KiB at most. `done`: a message follows, or is here, whose `client_message_id` is the
    `reply_id`; `failed`: none will.
    """

    type = "reply_state"
    chat_id: str
    reply_id: str
    sender_id: str
    epoch: int
    from_entry: int = field(name="from")
    to_entry: int = field(name="to")
    text: str
    state: ReplyTextStatus


class Error(Payload, frozen=True):
    """A failed request or a warning. ``outcome`` unknown: the write may be stored."""

    type = "error"
    code: str
    message: str
    retryable: bool
    outcome: Literal["rejected", "unknown"] | None = None
    retry_after_seconds: float | None = None
    grace_period_seconds: float | None = None
    details: Mapping[str, Any] | None = None


class ErrorBody(Struct, frozen=True):
    """What HTTP answers where it refuses: the payload of an error frame."""

    error: Error


class ConnectionClosing(Payload, frozen=True):
    """The server closes, why, and from where to sync; the last frame.

    ``sync_from_sequence`` names 500 chats at most; who is behind in more learns of the
    others from ``resumed``.
    """

    type = "connection_closing"
    reason: str
    message: str
    reconnect_allowed: bool
    reconnect_delay_ms: int
    sync_from_sequence: Mapping[str, int]


ServerPayload = (
    ConnectionEstablished
    | Authenticated
    | MessageAck
    | Resumed
    | Resync
    | Heartbeat
    | Typing
    | Presence
    | Receipt
    | ReplyTextDelta
    | ReplyTextState
    | Error
    | ConnectionClosing
)
"""All but ``message`` and ``sync_response``, whose payloads are Message and Page."""

Sendable = ServerPayload | Message | Page

CLIENT_FRAMES: Mapping[str, type[ClientFrame]] = {
    str(frame.__struct_config__.tag): frame for frame in get_args(AnyClientFrame)
}
"""Every frame of a client by its ``type``."""

SERVER_PAYLOADS: Mapping[str, type[Sendable]] = {
    "message": Message,
    "sync_response": Page,
    **{payload.type: payload for payload in get_args(ServerPayload)},
}
"""The payload of every frame of the server by its ``type``."""
