"""What a session asks its connection to do: a small closed union. (Pure.)

The connection carries effects out in order, in a ``match`` that ends in ``assert_never``. Answers come back
through the session's methods: ``sent`` for Submit, ``pulled`` for Fetch and FetchResume, ``authenticated`` for
Verify; answers that come after the close are ignored. Frames to the client are not effects: they wait in the session's
lanes, and ``Wake`` says that there is something to take.
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
    """There is something in the lanes: take and write it before this turn of the loop ends."""


class Submit(Struct, frozen=True, gc=False):
    """Hand a send to ingest; answer with ``Session.sent(token, outcome)``."""

    token: int
    body: SendBody


class Fetch(Struct, frozen=True, gc=False):
    """Read a sync page; answer with ``Session.pulled(token, page or error)``. One at a time.

    ``asked_at``: when the client asked; it may have waited for its turn since, and its time runs from there.
    ``proofs``: of the cursors that came with one, by chat.
    """

    token: int
    chat_id: str
    cursor: Cursor
    limit: int
    asked_at: float
    proofs: Mapping[str, str] = NO_PROOFS


class FetchResume(Struct, frozen=True, gc=False):
    """Read what moved past these cursors; answer with ``Session.pulled``. One at a time, with Fetch."""

    token: int
    cursors: Mapping[str, Cursor]
    asked_at: float
    proofs: Mapping[str, str] = NO_PROOFS


class Verify(Struct, frozen=True, gc=False):
    """Check a refreshed token; answer with ``Session.authenticated``."""

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
    """The user started or stopped typing; expires by itself."""

    chat_id: str
    active: bool


class PauseReading(Struct, frozen=True, gc=False):
    """The control lane is full: read no more from the socket until ``ReadOn``."""


class ResumeReading(Struct, frozen=True, gc=False):
    """Read from the socket again."""


class SessionEvent(Enum):
    """What a session notices and an operator wants counted; the value is the name of the event."""

    BUFFER_ABOVE_WARNING = "outbound_buffer_above_warning"
    SLOW_CONSUMER_WARNED = "slow_consumer_warned"
    SLOW_CONSUMER_RECOVERED = "slow_consumer_recovered"
    FELL_BEHIND = "delivery_skipped"
    ACKS_STALE = "acks_stale"
    WORK_RATE_EXCEEDED = "work_rate_exceeded"


class Emit(Struct, frozen=True, gc=False):
    """Something to count, and to log where it is rare; the client has been told what concerns it."""

    sign: SessionEvent


class Close(Struct, frozen=True, gc=False):
    """Write what is in the control lane (the closing is its last frame), then close with the reason's code."""

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
