"""What a client asks: open requests and their rates; acks, reads and typing. (Pure.)

A request (a send, a pull, a token refresh) is answered exactly once: by its result, by
its age, or by the close. At most ``max_queue_depth`` are open; one more is refused with
SERVER_BUSY. ``Requests`` keeps them with the rates of all frames, ``Overload`` notices
a connection most of whose requests are refused as busy.

Acks, reads and typing expect no response. ``note`` turns one into an effect or an
error.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import (
    Deferred,
    HoldfastError,
    InvalidMessage,
    NotAMember,
    RateLimited,
    ServerBusy,
)
from holdfast.resilience import Bucket
from holdfast.session.effects import Delivered, IsTyping, WasRead
from holdfast.session.progress import ChatProgress
from holdfast.session.settings import InboundSettings, TimeoutSettings
from holdfast.wire.frames import (
    Ack,
    AckBody,
    Authenticate,
    Read,
    ReadBody,
    Resume,
    SendMessage,
    SyncRequest,
    TypingStart,
    TypingStop,
)

_Request = SendMessage | SyncRequest | Resume | Authenticate
"""A frame that gets a response."""


class Requests:
    """The open requests and rates of one connection."""

    __slots__ = ("_inbound", "_invalid_at", "_others", "_sends", "_token", "open")

    def __init__(self, inbound: InboundSettings) -> None:
        self._inbound = inbound
        self._sends: Bucket | None = None
        self._others: Bucket | None = None
        self._invalid_at: list[float] | None = None
        self._token = 0
        self.open: dict[int, _Request] | None = None

    def rate_send(self, now: float) -> Deferred | None:
        """Count a send; the refusal says how long to wait."""
        if self._sends is None:
            self._sends = Bucket(
                self._inbound.rate_limit_per_second, self._inbound.rate_limit_burst, now
            )
        wait = self._sends.take(now)
        return _rated(wait, "messages", self._inbound.rate_limit_per_second) if wait else None

    def rate_other(self, now: float) -> Deferred | None:
        """Count any other frame; the refusal says how long to wait."""
        if self._others is None:
            self._others = Bucket(
                self._inbound.other_rate_limit_per_second, self._inbound.other_rate_limit_burst, now
            )
        wait = self._others.take(now)
        return _rated(wait, "frames", self._inbound.other_rate_limit_per_second) if wait else None

    def full(self) -> Deferred | None:
        """Why no further request can be opened, or None."""
        if self.open is None or len(self.open) < self._inbound.max_queue_depth:
            return None
        return ServerBusy(
            f"{len(self.open)} requests are not answered yet",
            retry_after_seconds=1,
            limit=self._inbound.max_queue_depth,
        )

    def begin(self, request: _Request) -> int:
        """Open a request; returns the token under which its result comes back."""
        self._token += 1
        if self.open is None:
            self.open = {}
        self.open[self._token] = request
        return self._token

    def end(self, token: int) -> _Request | None:
        """Take out a request to answer it; None if it was answered before."""
        if self.open is None:
            return None
        request = self.open.pop(token, None)
        if not self.open:
            self.open = None
        return request

    def count_invalid(self, now: float) -> bool:
        """Count an invalid frame; whether the connection must close for it."""
        recent = [
            at
            for at in self._invalid_at or ()
            if at > now - self._inbound.invalid_frames_window_seconds
        ]
        recent.append(now)
        self._invalid_at = recent
        return len(recent) >= self._inbound.max_invalid_frames


def _rated(wait: float, what: str, rate: float) -> Deferred:
    return RateLimited(
        f"more than {rate:g} {what} per second", retry_after_seconds=max(round(wait, 3), 0.001)
    )


class Overload:
    """Counts requests refused as busy.

    If they are more than half of a window's, the client had better connect elsewhere.
    """

    __slots__ = ("_busy", "_requests", "_since")

    def __init__(self) -> None:
        self._since: float | None = None
        self._requests = 0
        self._busy = 0

    def count(self, *, busy: bool, now: float) -> None:
        """Count an answered request. A window begins with the first refusal."""
        if self._since is None:
            if not busy:
                return
            self._since = now
        self._requests += 1
        self._busy += busy

    def due(self, timeouts: TimeoutSettings) -> float | None:
        return None if self._since is None else self._since + timeouts.overload_window_seconds

    def judge(self, timeouts: TimeoutSettings, now: float) -> bool:
        """Whether a window has ended and was overloaded; it is then cleared."""
        due = self.due(timeouts)
        if due is None or now < due:
            return False
        overloaded = (
            self._requests >= timeouts.overload_requests_min and self._busy * 2 > self._requests
        )
        self._since = None
        self._requests = self._busy = 0
        return overloaded


Note = Ack | Read | TypingStart | TypingStop


def note(
    frame: Note, chats: Mapping[str, ChatProgress]
) -> Delivered | WasRead | IsTyping | HoldfastError | None:
    """The effect of the frame, its refusal, or None if it says nothing new."""
    chat_id = frame.payload.chat_id
    if (progress := chats.get(chat_id)) is None:
        return NotAMember("not a member of this chat", chat_id=chat_id)
    match frame:
        case Ack(payload=body):
            return _acked(progress, body)
        case Read(payload=body):
            return _read(progress, body)
        case _:
            return IsTyping(chat_id, active=isinstance(frame, TypingStart))


def _acked(progress: ChatProgress, body: AckBody) -> Delivered | HoldfastError | None:
    """An ack beyond what was sent is a client's defect and refused.

    One of an older epoch is ignored: it crossed with the frame about the newer epoch.
    """
    if body.epoch > progress.epoch or (
        body.epoch == progress.epoch and body.sequence > progress.through
    ):
        return InvalidMessage(
            f"acked {body.sequence} in epoch {body.epoch}; the last one sent is"
            f" {progress.through} in epoch {progress.epoch}",
            field="sequence",
            chat_id=body.chat_id,
        )
    if body.epoch < progress.epoch or body.sequence <= progress.acked:
        return None
    progress.acked = body.sequence
    return Delivered(body.chat_id, progress.epoch, body.sequence)


def _read(progress: ChatProgress, body: ReadBody) -> WasRead | HoldfastError:
    """A read is bounded by the chat's head: the user may read elsewhere, too."""
    if body.sequence > progress.head:
        return InvalidMessage(
            f"read up to {body.sequence}, but the chat ends at {progress.head}",
            field="sequence",
            chat_id=body.chat_id,
        )
    return WasRead(body.chat_id, progress.epoch, body.sequence)
