"""One client's session: what the client may do next and what it must be sent. (Pure.)

The connection calls a method for each event and carries out the effects it returns, in
order. Frames for the client wait in the lanes. The effect ``Wake`` says that there are
some, once until the next ``take``, which hands them out.

Two promises: nothing is dropped without a ``resync`` or a closing frame that says from
where to sync, and every accepted request is answered before a close.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping
from typing import assert_never

from holdfast.access.principal import Principal
from holdfast.errors import HoldfastError, InvalidMessage, OutcomeUnknown, ServerBusy, Unavailable
from holdfast.message import Cursor, Outcome, Page, ResumeRead, check_id
from holdfast.session.effects import Close, Effect, Effects, Emit, SessionEvent, Submit, Verify
from holdfast.session.growing_reply import GrowingReply
from holdfast.session.heartbeat import NOTHING_WAITS, Transmission
from holdfast.session.lifetime import Lifetime
from holdfast.session.outbound import NOTHING, OutboundBuffer
from holdfast.session.progress import ChatProgress
from holdfast.session.pulls import Pull, Pulls
from holdfast.session.requests import Requests, _Request, note
from holdfast.session.responses import acknowledgement, closing_frame, established_frame, resumed
from holdfast.session.scopes import forbidden
from holdfast.session.settings import SessionSettings
from holdfast.session.validation import refusal_of, refusal_of_send
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.codec import EncodedRun, encode_frame, error_payload
from holdfast.wire.frames import (
    Ack,
    AnyClientFrame,
    Authenticate,
    Authenticated,
    Heartbeat,
    HeartbeatAck,
    Read,
    Resume,
    SendBody,
    SendMessage,
    SyncRequest,
    TypingStart,
    TypingStop,
)

_NoSend = Authenticate | Ack | Resume | SyncRequest | HeartbeatAck | TypingStart | TypingStop | Read
_RATE_ERROR_SECONDS = 1.0


class Session:
    """One connection's session. Times are monotonic seconds; it is not thread-safe."""

    __slots__ = (
        "_lifetime",
        "_outbound",
        "_pulls",
        "_rate_reported_at",
        "_requests",
        "_settings",
        "closed",
        "connection_id",
        "device_id",
        "principal",
        "user",
    )

    def __init__(
        self,
        settings: SessionSettings,
        connection_id: str,
        principal: Principal,
        device_id: str,
        now: float,
        expires_at: float | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """``expires_at``: of the token. ``rng`` spreads heartbeats and rotations."""
        self._settings = settings
        self.connection_id = connection_id
        self.principal = principal
        self.user = principal.user
        self.device_id = device_id
        self.closed = False
        self._outbound = OutboundBuffer(settings)
        self._requests = Requests(settings.backpressure.inbound)
        self._pulls = Pulls(settings)
        self._lifetime = Lifetime(settings.timeouts, now, expires_at, rng.random() if rng else 0.0)
        self._rate_reported_at = now - _RATE_ERROR_SECONDS

    @property
    def chats(self) -> Mapping[str, ChatProgress]:
        """The chats this session is in, or was in when it closed."""
        return self._outbound.chats

    @property
    def open_requests(self) -> int:
        """How many accepted requests are not answered yet."""
        return len(self._requests.open or ())

    @property
    def waiting_messages(self) -> int:
        """How many delivered messages wait to be taken."""
        return self._outbound.lanes.messages

    @property
    def waiting_bytes(self) -> int:
        """How many bytes wait to be taken, in all lanes."""
        return self._outbound.lanes.waiting_bytes

    def establish(self, memberships: Mapping[str, Cursor], server_time: str) -> Effects:
        """The user's chats are known: queue ``connection_established``.

        Call it once, before ``receive`` and any delivery.
        """
        if self.closed:
            return NOTHING
        reads = self.principal.reads
        self._outbound.establish(
            {chat_id: head for chat_id, head in memberships.items() if reads(chat_id)}
        )
        effects: list[Effect] = []
        greeting = established_frame(
            self._settings, self.connection_id, self.user.user_id, self.device_id, server_time
        )
        self._outbound.enqueue_control(greeting, None, effects)
        return effects

    # Frames from the client.

    def receive(self, frame: AnyClientFrame, now: float) -> Effects:
        """Handle a frame. Order of refusals: validation, rate, scope, queue."""
        if self.closed:
            return NOTHING
        if frame.request_id is not None and (reason := check_id(frame.request_id, "request_id")):
            return self.on_invalid_frame(InvalidMessage(reason, field="request_id"), None, now)
        effects: list[Effect] = []
        if isinstance(frame, SendMessage):
            refusal = self._refusal_of_send(frame.payload, now)
            if refusal is None:
                effects.append(Submit(self._requests.begin(frame), frame.payload))
                if self._outbound.unobstructed:
                    return effects
        elif (refusal := refusal_of(frame, self._settings)) is None:
            self._admit(frame, effects, now)
        if refusal is not None:
            self._refuse(frame, refusal, effects)
            if isinstance(refusal, InvalidMessage) and self._requests.count_invalid(now):
                effects += self.close(CloseReason.PROTOCOL_ERROR)
        if self._outbound.control_overflows(self._settings.backpressure.inbound.max_queue_depth):
            effects += self.close(CloseReason.OVERLOADED)
        return effects

    def _refusal_of_send(self, body: SendBody, now: float) -> HoldfastError | None:
        bytes_max = self._settings.backpressure.inbound.max_message_size_bytes
        return (
            refusal_of_send(body, bytes_max)
            or self._requests.rate_send(now)
            or self.principal.refusal("chats:send", body.chat_id)
            or self._full(now)
        )

    def on_invalid_frame(self, error: HoldfastError, request_id: str | None, now: float) -> Effects:
        """Answer a frame that could not be decoded; close after too many."""
        if self.closed:
            return NOTHING
        if request_id is not None and check_id(request_id, "request_id"):
            request_id = None
        effects: list[Effect] = []
        self._outbound.enqueue_control(error_payload(error), request_id, effects)
        if self._requests.count_invalid(now):
            effects += self.close(CloseReason.PROTOCOL_ERROR)
        return effects

    def on_ping(self, now: float) -> bool:
        """Whether a WebSocket ping, which counts as a frame, may be answered.

        The rate error is queued without a wake-up; ``tick`` finds it.
        """
        if self.closed:
            return False
        if not self._exceeds_rate([], now):
            return True
        self._outbound.on_effects_dropped()
        return False

    def _admit(self, frame: _NoSend, effects: list[Effect], now: float) -> None:
        match frame:
            case SyncRequest() | Resume() | Authenticate():
                refusal = self._requests.rate_other(now) or forbidden(frame, self.principal)
                if refusal is not None:
                    self._refuse(frame, refusal, effects)
                else:
                    self._ask(frame, effects, now)
            case HeartbeatAck():
                if not self._lifetime.heartbeat.answered():
                    self._exceeds_rate(effects, now)
            case Ack() | Read() | TypingStart() | TypingStop():
                if self._exceeds_rate(effects, now):
                    return
                noted = forbidden(frame, self.principal) or note(frame, self._outbound.chats)
                if isinstance(noted, HoldfastError):
                    self._refuse(frame, noted, effects)
                elif noted is not None:
                    effects.append(noted)
            case _:
                assert_never(frame)

    def _ask(
        self, frame: SyncRequest | Resume | Authenticate, effects: list[Effect], now: float
    ) -> None:
        refusal = self._pulls.gather(frame.payload) if isinstance(frame, Resume) else None
        if refusal is None and isinstance(frame, Resume) and frame.payload.more:
            return  # answered with the last frame of the resume
        if (refusal := refusal or self._full(now)) is not None:
            self._refuse(frame, refusal, effects)
            return
        match frame:
            case SyncRequest(payload=body):
                self._pulls.sync(self._requests.begin(frame), body, now)
                self._pull_next(effects)
            case Resume():
                self._pulls.resume(self._requests.begin(frame), now)
                self._pull_next(effects)
            case Authenticate(payload=body) if body.device_id in (None, self.device_id):
                effects.append(Verify(self._requests.begin(frame), body.token))
            case Authenticate():
                text = "a connection's device cannot change: open a new connection"
                self._refuse(frame, InvalidMessage(text, field="device_id"), effects)

    def _full(self, now: float) -> HoldfastError | None:
        if (refusal := self._requests.full()) is not None:
            self._lifetime.overload.count(busy=True, now=now)
        return refusal

    def _refuse(self, frame: AnyClientFrame, refusal: HoldfastError, effects: list[Effect]) -> None:
        if isinstance(frame, SendMessage):
            busy = isinstance(refusal, ServerBusy)
            event = SessionEvent.SEND_TURNED_AWAY if busy else SessionEvent.SEND_REFUSED
            effects.append(Emit(event))
            self._fail(frame, refusal, effects)
            return
        if isinstance(frame, Resume):
            self._pulls.spoil(frame.payload)
        self._outbound.enqueue_control(error_payload(refusal), frame.request_id, effects)

    def _exceeds_rate(self, effects: list[Effect], now: float) -> bool:
        """Count a frame that expects no answer; an excess is reported once a second."""
        refusal = self._requests.rate_other(now)
        if refusal is not None and now - self._rate_reported_at >= _RATE_ERROR_SECONDS:
            self._rate_reported_at = now
            self._outbound.enqueue_control(error_payload(refusal), None, effects)
        return refusal is not None

    # Results of requests.

    def on_send_result(self, token: int, outcome: Outcome, now: float) -> Effects:
        """A send was stored or refused, or its outcome is unknown."""
        effects: list[Effect] = []
        if (request := self._requests.end(token)) is None:
            return effects
        self._lifetime.overload.count(busy=isinstance(outcome, ServerBusy), now=now)
        if isinstance(outcome, HoldfastError):
            self._fail(request, outcome, effects)
            return effects
        assert isinstance(request, SendMessage)
        ack = acknowledgement(request.payload.client_message_id, outcome)
        self._outbound.enqueue_control(ack, request.request_id, effects)
        return effects

    def on_page(self, token: int, result: Page | ResumeRead | HoldfastError, now: float) -> Effects:
        """The page of a ``sync_request`` or ``resume`` was read.

        Settling a page and queueing it are one step, so no delivery comes in between.
        """
        effects: list[Effect] = []
        pull = self._pulls.under_way
        if (request := self._requests.end(token)) is None or pull is None:
            return effects
        self._pulls.under_way = None
        if not isinstance(result, HoldfastError):
            result = self._pulls.end(pull, result)
        self._lifetime.overload.count(busy=isinstance(result, ServerBusy), now=now)
        match result:
            case HoldfastError():
                self._fail(request, result, effects)
            case Page():
                self._answer_sync(result, request, effects)
            case ResumeRead():
                self._answer_resume(result, pull, request, effects)
            case _:
                assert_never(result)
        self._pull_next(effects)
        return effects

    def _answer_sync(self, page: Page, request: _Request, effects: list[Effect]) -> None:
        progress = self._outbound.chats.get(page.chat_id)
        shown = page if progress is None else progress.settle(page)
        self._outbound.enqueue_page(encode_frame(shown, request.request_id), effects)

    def _answer_resume(
        self, read: ResumeRead, pull: Pull, request: _Request, effects: list[Effect]
    ) -> None:
        """Queue ``resumed`` as a page; resync the chats that it cannot name."""
        chats = self._outbound.chats
        answer, late = resumed(chats, pull.cursors, read, self._settings.pages.max_bytes)
        self._outbound.enqueue_page(encode_frame(answer, request.request_id), effects)
        for chat_id, progress in late.items():
            self._outbound.request_resync(chat_id, progress, effects)

    def on_token_checked(
        self, token: int, result: float | HoldfastError | None, now: float
    ) -> Effects:
        """A refreshed token was checked: its expiry (None: never) or refusal.

        The caller must refuse a token of another user or tenant. After a refusal the
        earlier expiry stands.
        """
        effects: list[Effect] = []
        if (request := self._requests.end(token)) is None:
            return effects
        if isinstance(result, HoldfastError):
            self._fail(request, result, effects)
            return effects
        self._lifetime.expires_at = result
        expires_in_ms = None if result is None else max(int((result - now) * 1000), 0)
        self._outbound.enqueue_control(Authenticated(expires_in_ms), request.request_id, effects)
        return effects

    def _fail(self, request: _Request, error: HoldfastError, effects: list[Effect]) -> None:
        key = request.payload.client_message_id if isinstance(request, SendMessage) else None
        payload = error_payload(error, of_send=key is not None, client_message_id=key)
        self._outbound.enqueue_control(payload, request.request_id, effects)

    def _pull_next(self, effects: list[Effect]) -> None:
        """Start the next pull, if the last page has been taken."""
        if self._outbound.lanes.page is None:
            pull = self._pulls.begin(self._outbound.chats)
            if pull is not None:
                effects.append(pull.effect())

    # What else the client must be sent.

    def deliver(self, run: EncodedRun, now: float) -> Effects:
        """Queue the run if it is next and fits, see ``OutboundBuffer.deliver``."""
        return self._outbound.deliver(run, now)

    def deliver_at_once(self, run: EncodedRun) -> bool:
        """Whether the caller must write the run; see ``OutboundBuffer``."""
        return self._outbound.deliver_at_once(run)

    def on_membership(
        self, chat_id: str, head: Cursor | None, *, event_delivered: bool = True
    ) -> Effects:
        """The user is in a chat, whose head was read with that, or left it (None).

        ``event_delivered``: sessions that are live in the chat were sent the event.
        """
        effects: list[Effect] = []
        if self.closed or (head is not None and not self.principal.reads(chat_id)):
            return effects
        progress = self._outbound.chats.get(chat_id)
        announced = self._pulls.concerns(chat_id, head is not None) or (
            event_delivered and progress is not None and progress.live
        )
        self._outbound.on_membership(chat_id, head, effects, announced)
        return effects

    def ephemeral(self, key: Hashable, frame: bytes) -> Effects:
        """Queue typing, presence or a receipt; dropped if the buffer is too full."""
        effects: list[Effect] = []
        if not self.closed:
            self._outbound.enqueue_ephemeral(key, frame, effects)
        return effects

    def on_reply_grown(self, reply: GrowingReply) -> Effects:
        """A reply has grown or ended: send what the client lacks of it."""
        effects: list[Effect] = []
        self._outbound.show_reply(reply, effects)
        return effects

    def knows(self, chat_id: str, head: Cursor) -> bool:
        """Whether ``on_head`` would change nothing, which is the usual case."""
        progress = self._outbound.chats.get(chat_id)
        return progress is None or self._lifetime.heartbeat.knows(chat_id, progress, head)

    def on_head(self, chat_id: str, head: Cursor, now: float) -> Effects:
        """Compare a chat with its head in the store; may bring ``next_tick`` forward.

        A newer epoch makes the client's copy of the chat invalid, so a resync follows
        at once.
        """
        effects: list[Effect] = []
        if self.closed or (progress := self._outbound.chats.get(chat_id)) is None:
            return effects
        raised = progress.epoch < head.epoch
        self._lifetime.heartbeat.compare(chat_id, progress, head, now)
        if raised:
            self._outbound.request_resync(chat_id, progress, effects)
        return effects

    def take_single(self) -> bytes | None:
        """The one run that waits, if nothing else does; else None: use ``take``.

        It needs no ``on_written``.
        """
        return self._outbound.take_single()

    def take(self, bytes_max: int) -> list[bytes]:
        """Whole frames to write, of about ``bytes_max``; then call ``on_written``.

        After the close: all control frames, whose last is the closing frame.
        """
        return self._outbound.take(bytes_max)

    def on_written(self, now: float) -> Effects:
        """The frames of ``take`` are written: go on with pulls and reading."""
        if self.closed or (self._outbound.unobstructed and not self._pulls.waits):
            return NOTHING
        effects: list[Effect] = []
        self._outbound.on_written(effects, now)
        self._pull_next(effects)
        return effects

    # Timers and the close.

    def on_bytes_read(self) -> None:
        """Bytes from the client were read, which shows that it is alive."""
        self._lifetime.heartbeat.answered()

    def tick(self, now: float, sent: Transmission = NOTHING_WAITS) -> Effects:
        """Check every timer; harmless if early. ``sent``: how far writes have come."""
        if self.closed:
            return NOTHING
        if (closing := self._lifetime.end(now, sent, self._outbound)) is not None:
            return self.close(closing)
        effects: list[Effect] = []
        for pull in self._pulls.too_old(now):
            if (request := self._requests.end(pull.token)) is not None:
                self._lifetime.overload.count(busy=True, now=now)
                busy = ServerBusy("the request waited too long", retry_after_seconds=1)
                self._fail(request, busy, effects)
        self._outbound.catch_up(effects, now)
        self._pull_next(effects)
        if now >= self._lifetime.heartbeat.due:
            self._beat(effects, now, sent)
        return effects

    def _beat(self, effects: list[Effect], now: float, sent: Transmission) -> None:
        chats = self._outbound.chats
        if not self._outbound.lanes.runs and not sent.unsent:
            stale, diverged = self._lifetime.stale_acks.check(chats, now)
            if diverged:
                effects += self.close(CloseReason.STATE_DIVERGED)
                return
            for chat_id in stale:
                effects.append(Emit(SessionEvent.ACKS_STALE))
                chats[chat_id].fall_behind()
                self._outbound.request_resync(chat_id, chats[chat_id], effects)
        heads = self._lifetime.heartbeat.ask(
            chats, now, sent, self._settings.pages.resume_chats_per_frame
        )
        self._outbound.enqueue_control(Heartbeat(heads), None, effects)

    @property
    def next_tick(self) -> float:
        """When ``tick`` has something to do; other calls may bring it forward."""
        if self.closed:
            return math.inf
        if self._outbound.has_lost_effects or (
            self._pulls.ready and self._outbound.lanes.page is None
        ):
            return -math.inf
        times = (self._lifetime.next, self._outbound.grace_ends, self._pulls.next_too_old)
        return min(time for time in times if time is not None)

    def close(
        self, closing: CloseReason, reconnect_delay_ms: int = 0, message: str | None = None
    ) -> Effects:
        """Answer open requests, queue the closing frame, close; only once."""
        if self.closed:
            return NOTHING
        effects: list[Effect] = []
        for token in list(self._requests.open or ()):
            if (request := self._requests.end(token)) is not None:
                sent = isinstance(request, SendMessage)
                text = f"the connection closes: {closing.reason}"
                self._fail(request, OutcomeUnknown(text) if sent else Unavailable(text), effects)
        self._pulls.close()
        last_words = closing_frame(closing, message, reconnect_delay_ms, self._outbound.close())
        self._outbound.enqueue_control(last_words, None, effects)
        self.closed = True
        effects.append(Close(closing))
        return effects
