"""What a session asks its connection to do: a small closed union. (Pure.)

The connection carries effects out in order, in a ``match`` that ends in
``assert_never``. Results come back through the session's methods: ``on_send_result``
for Submit, ``on_page`` for Fetch and FetchResume, ``on_token_checked`` for Verify;
after the close they are ignored. Frames to the client are not effects: they wait in the
session's lanes, and ``Wake`` says that there are some.

Effects of every frame are made by position (``Submit(token, body)``): names cost 8 ns
of 130. They have few fields, whose order is that of the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from msgspec import Struct

from holdfast.message import Cursor
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.frames import SendBody

NO_PROOFS: Mapping[str, str] = MappingProxyType({})


class Wake(Struct, frozen=True, gc=False):
    """Take what is in the lanes and write it before this turn of the loop ends."""


class Submit(Struct, frozen=True, gc=False):
    """Hand a send to ingest; call ``Session.on_send_result`` with its outcome."""

    token: int
    body: SendBody


class Fetch(Struct, frozen=True, gc=False):
    """Read a page of one chat; call ``Session.on_page`` with it or the error.

    A session has one Fetch or FetchResume under way at a time. ``asked_at``: when the
    request arrived; its deadline counts from there. ``proofs``: of the cursors that
    came with one, by chat.
    """

    token: int
    chat_id: str
    cursor: Cursor
    limit: int
    asked_at: float
    proofs: Mapping[str, str] = NO_PROOFS


class FetchResume(Struct, frozen=True, gc=False):
    """Read the chats that moved past these cursors; call ``Session.on_page``."""

    token: int
    cursors: Mapping[str, Cursor]
    asked_at: float
    proofs: Mapping[str, str] = NO_PROOFS


class Verify(Struct, frozen=True, gc=False):
    """Check a refreshed token; call ``Session.on_token_checked``."""

    token: int
    credential: str


class Delivered(Struct, frozen=True, gc=False):
    """The device has stored the chat up to ``sequence``: a watermark."""

    chat_id: str
    epoch: int
    sequence: int


class WasRead(Struct, frozen=True, gc=False):
    """The user has read the chat up to ``sequence``: a watermark."""

    chat_id: str
    epoch: int
    sequence: int


class IsTyping(Struct, frozen=True, gc=False):
    """The user started or stopped typing; it expires by itself."""

    chat_id: str
    active: bool


class PauseReading(Struct, frozen=True, gc=False):
    """The control lane is full: stop reading the socket until ``ResumeReading``."""


class ResumeReading(Struct, frozen=True, gc=False):
    """Read from the socket again."""


class SessionEvent(Enum):
    """An event that operators want counted; the value is its name."""

    BUFFER_ABOVE_WARNING = "outbound_buffer_above_warning"
    SLOW_CONSUMER_WARNED = "slow_consumer_warned"
    SLOW_CONSUMER_RECOVERED = "slow_consumer_recovered"
    FELL_BEHIND = "delivery_skipped"
    ACKS_STALE = "acks_stale"
    WORK_RATE_EXCEEDED = "work_rate_exceeded"
    SEND_REFUSED = "send_refused"
    SEND_TURNED_AWAY = "send_turned_away"


class Emit(Struct, frozen=True, gc=False):
    """Count an event, and log it if it is rare."""

    event: SessionEvent


class Close(Struct, frozen=True, gc=False):
    """Write the control lane, whose last frame is the closing; close with this code."""

    closing: CloseReason


Effect = (
    Wake
    | Submit
    | Fetch
    | FetchResume
    | Verify
    | Delivered
    | WasRead
    | IsTyping
    | PauseReading
    | ResumeReading
    | Emit
    | Close
)
Effects = Sequence[Effect]
