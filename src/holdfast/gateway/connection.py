"""One connection: carries out the effects of its session and decides nothing itself.

It knows no WebSocket library: frames come in through its methods, bytes leave through
``Socket``. So a simulation drives the same code that serves real sockets.

    unauthenticated ──authenticate──> opening ──memberships read──> open ──> closed
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from enum import Flag, auto
from functools import partial
from typing import assert_never

from holdfast import telemetry
from holdfast.access.principal import Principal
from holdfast.clock import timestamp
from holdfast.errors import HoldfastError, InvalidMessage, Unauthorized, Unavailable
from holdfast.gateway.contract import ConnectionHost, GatewayDeps, Socket
from holdfast.gateway.transport.linger import LINGER_SECONDS
from holdfast.message import Outcome, Page, ResumeRead, User
from holdfast.session import effects
from holdfast.session.effects import Effects, SessionEvent
from holdfast.session.responses import closing_frame
from holdfast.session.session import Session
from holdfast.session.validation import refusal_of
from holdfast.session.work_rate import WorkRate
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.codec import (
    decode_client_frame,
    encode_frame,
    error_payload,
    pong_frame,
    request_id_of,
)
from holdfast.wire.frames import Authenticate

WRITE_BYTES = 64 * 1024
"""Taken from the lanes per write: enough to fill a system call, and all that a
transport holds of a socket that stops taking data."""
EARLY_FRAMES_MAX = 100
EARLY_BYTES_MAX = 256 * 1024
"""Frames a client may send before ``connection_established``; they wait for it."""
LOG_EVENTS = {
    SessionEvent.BUFFER_ABOVE_WARNING: "gateway.outbound_buffer_filled",
    SessionEvent.SLOW_CONSUMER_WARNED: "gateway.slow_consumer_warned",
    SessionEvent.SLOW_CONSUMER_RECOVERED: "gateway.slow_consumer_recovered",
}
"""Rare events of a client in trouble are logged; the others are only counted."""


class _Hold(Flag):
    """Why a socket is not read."""

    OPENING = auto()
    CONTROL_LANE = auto()
    WORK = auto()


class Connection:
    """The shell around one session."""

    __slots__ = (
        "_deps",
        "_early",
        "_holds",
        "_host",
        "_identify",
        "_opened_at",
        "_pong",
        "_session_type",
        "_socket",
        "_work",
        "authenticated",
        "closing",
        "connection_id",
        "device_id",
        "dirty",
        "due",
        "established",
        "leaving",
        "paused",
        "session",
        "write",
    )

    def __init__(
        self,
        deps: GatewayDeps,
        host: ConnectionHost,
        socket: Socket,
        device_id: str,
        identify: Callable[[Principal], None] = lambda principal: None,
        session_type: type[Session] = Session,
    ) -> None:
        """``identify`` gets the principal of a first frame, and may raise a refusal."""
        self._identify = identify
        self._session_type = session_type
        self._deps = deps
        self._host = host
        self._socket = socket
        self._opened_at = deps.clock.monotonic()
        self._early: Sequence[bytes] = ()
        self._work = WorkRate(deps.settings.backpressure.inbound, self._opened_at)
        self._holds = _Hold(0)
        self._pong: bytes | None = None
        """Body of the pong to write when the socket takes data again."""
        self.connection_id = deps.ids.new("conn_")
        self.device_id = device_id or self.connection_id
        self.authenticated = False
        self.session: Session
        """Set by ``open``, once the client is authenticated."""
        self.established = False
        self.write = socket.write
        self.paused = False
        self.dirty = False
        self.due = 0.0
        """When to call ``tick``; 0 after anything that may have brought it forward."""
        self.closing: CloseReason | None = None
        self.leaving = False
        """No frame is handled any more; it closes once open requests are answered."""

    @property
    def user(self) -> User:
        return self.session.user

    @property
    def chats(self) -> Collection[str]:
        return self.session.chats.keys()

    def reads(self, chat_id: str) -> bool:
        return self.session.principal.reads(chat_id)

    @property
    def open_requests(self) -> int:
        """Requests of the client that are not answered yet."""
        return self.session.open_requests if self.authenticated else 0

    @property
    def _marked_as(self) -> str:
        """The device id of its watermarks.

        A client without a device id gets another one with each connection, so all such
        clients of a user share the empty one.
        """
        return "" if self.device_id == self.connection_id else self.device_id

    @property
    def waiting_bytes(self) -> int:
        """Bytes in the lanes, and in the socket's buffer while it is paused.

        The latter count because a page leaves its lane in one piece.
        """
        in_lanes = self.session.waiting_bytes if self.authenticated else 0
        return in_lanes + (self._socket.unsent if self.paused else 0)

    # --- called by the socket ---------------------------------------------------------

    def frame_received(self, data: bytes | memoryview) -> None:
        """Handle a whole text message from the client."""
        if self.closing is not None or self.leaving:
            return
        if self.authenticated and not self.established:
            self._queue_early_frame(data)
            return
        now = self._deps.clock.monotonic()
        try:
            frame = decode_client_frame(data)
        except InvalidMessage as error:
            telemetry.frame_refused()
            self._invalid(error, request_id_of(data), now)
            return
        if not self.authenticated:
            if isinstance(frame, Authenticate):
                self._authenticate(frame)
            else:
                self._refuse(
                    Unauthorized("the first frame must be `authenticate`"), frame.request_id
                )
            return
        self.do(self.session.receive(frame, now))

    def ping_received(self, body: bytes) -> None:
        """Answer a ping within the frame rate; while paused keep only the last."""
        if self.closing is not None:
            return
        if self.authenticated and not self.session.on_ping(self._deps.clock.monotonic()):
            return
        if self.paused:
            self._pong = body
        else:
            self.write(pong_frame(body))

    def work_done(self, work: int) -> None:
        """Count the frames of one read; above the work rate reading pauses."""
        if self.authenticated:
            self.session.on_bytes_read()
        if self.closing is None and self._work.spend(work, self._deps.clock.monotonic()):
            self._hold(_Hold.WORK)
            self.due = 0.0
            telemetry.session_noticed(SessionEvent.WORK_RATE_EXCEEDED.value)

    def protocol_broken(self, message: str) -> None:
        """Close: the client broke the WebSocket protocol or a size limit."""
        self.close(CloseReason.PROTOCOL_ERROR, message=message)

    def writing_paused(self) -> None:
        self.paused = True

    def writing_resumed(self) -> None:
        self.paused = False
        self._host.wake(self)

    def connection_lost(self) -> None:
        """The socket is closed. Sends under way go on; their answers are dropped."""
        if self.closing is None:
            telemetry.connection_lost()
        self.closing = self.closing or CloseReason.IDLE_TIMEOUT
        self._host.on_lost(self)

    # --- called by the gateway --------------------------------------------------------

    def flush(self) -> None:
        """Write what waits, in as few writes as possible, until the socket pauses."""
        self.dirty = False
        if self.closing is not None or self.paused:
            return
        if self._pong is not None:
            body, self._pong = self._pong, None
            self.write(pong_frame(body))
        if not self.authenticated:
            return
        session = self.session
        if (run := session.take_single()) is not None:
            self.write(run)
            return
        while not self.paused and (chunks := session.take(WRITE_BYTES)):
            self.write(chunks[0] if len(chunks) == 1 else b"".join(chunks))
            if steps := session.on_written(self._deps.clock.monotonic()):
                self.do(steps)

    def tick(self, now: float) -> None:
        """Check the deadline of authentication, or those of the session."""
        if self._work.paused and self.closing is None:
            self._judge_work(now)
        if not self.authenticated:
            self.due = self._opened_at + self._deps.settings.timeouts.authentication_seconds
            if self.closing is None and now >= self.due:
                self.close(CloseReason.UNAUTHORIZED, message="no `authenticate` frame in time")
        else:
            if now >= self.session.next_tick:
                self.do(self.session.tick(now, self._socket.transmission()))
            self.due = self.session.next_tick
        if self._work.paused:
            self.due = 0.0

    def _judge_work(self, now: float) -> None:
        """Reading is paused: resume within the rate, close after too long."""
        if self._work.is_exceeded(now):
            if not self.authenticated:
                self.close(
                    CloseReason.UNAUTHORIZED, message="too many frames before authentication"
                )
            else:
                window = self._deps.settings.backpressure.inbound.work_pause_window_seconds
                self.close(
                    CloseReason.RATE_LIMITED, delay_ms=int(window * 1000) + self._host.spread_ms()
                )
        elif self._work.resume(now):
            self._release(_Hold.WORK)

    def close(self, closing: CloseReason, *, delay_ms: int = 0, message: str | None = None) -> None:
        """Answer open requests, send the reason, close. Safe to call twice."""
        if self.closing is not None:
            return
        delay_ms += self._host.spread_ms() if closing.spread else 0
        self._answer_early(Unavailable(f"the connection closes: {closing.reason}"))
        if self.authenticated:
            self.do(self.session.close(closing, delay_ms, message))
            return
        self.write(encode_frame(closing_frame(closing, message, delay_ms, {})))
        self._close_socket(closing)

    def stop_reading(self) -> None:
        """Stop reading and drop what was read; the caller closes it soon."""
        self.leaving = True
        self._socket.pause_reading()

    def abort(self) -> None:
        """End the socket at once after a defect; the client reconnects and resumes."""
        self._socket.abort()

    # --- effects ----------------------------------------------------------------------

    def do(self, steps: Effects) -> None:
        """Carry out the session's effects, in order."""
        self.due = 0.0
        for effect in steps:
            match effect:
                case effects.Wake():
                    self._host.wake(self)
                case effects.Submit():
                    self._submit(effect)
                case effects.Fetch() | effects.FetchResume():
                    self._host.start(self, self._read(effect))
                case effects.Verify():
                    self._verify(effect)
                case effects.Delivered():
                    self._deps.watermarks.delivered(
                        self.user, self._marked_as, effect.chat_id, effect.epoch, effect.sequence
                    )
                case effects.WasRead():
                    self._deps.watermarks.read(
                        self.user, self._marked_as, effect.chat_id, effect.epoch, effect.sequence
                    )
                case effects.IsTyping():
                    self._host.typing(self.user, effect.chat_id, effect.active)
                case effects.PauseReading():
                    self._hold(_Hold.CONTROL_LANE)
                case effects.ResumeReading():
                    self._release(_Hold.CONTROL_LANE)
                case effects.Emit():
                    telemetry.session_noticed(effect.event.value)
                    if (log_event := LOG_EVENTS.get(effect.event)) is not None:
                        self._host.log(self, log_event)
                case effects.Close():
                    self._close(effect.closing)
                case _:
                    assert_never(effect)

    def _hold(self, reason: _Hold) -> None:
        """Stop reading the socket until every such reason is released."""
        self._holds |= reason
        self._socket.pause_reading()

    def _release(self, reason: _Hold) -> None:
        self._holds &= ~reason
        if not self._holds and not self.leaving:
            self._socket.resume_reading()

    def _submit(self, effect: effects.Submit) -> None:
        deps = self._deps
        deadline = deps.clock.monotonic() + deps.settings.timeouts.durability_rpc_seconds
        answer = partial(self._answered, effect.token)
        deps.sends.submit(effect.body, self.session.user, self.connection_id, deadline, answer)

    def _answered(self, token: int, outcome: Outcome) -> None:
        if self.closing is None:
            self.do(self.session.on_send_result(token, outcome, self._deps.clock.monotonic()))

    async def _read(self, effect: effects.Fetch | effects.FetchResume) -> None:
        """Read one page; a session never has two reads under way."""
        session, history = self.session, self._deps.history
        result: Page | ResumeRead | HoldfastError
        try:
            if isinstance(effect, effects.Fetch):
                chat_id, proof = effect.chat_id, effect.proofs.get(effect.chat_id)
                result = await history.sync(
                    session.user, chat_id, effect.cursor, effect.limit, effect.asked_at, proof
                )
            else:
                only = session.principal.chats
                result = await history.resume(
                    session.user, effect.cursors, effect.asked_at, only, effect.proofs
                )
        except HoldfastError as error:
            result = error
        steps = session.on_page(effect.token, result, self._deps.clock.monotonic())
        if self.closing is None:
            self.do(steps)

    def _close(self, closing: CloseReason) -> None:
        """Write the control lane up to the closing frame, paused or not."""
        chunks = self.session.take(WRITE_BYTES)
        if chunks:
            self.write(b"".join(chunks))
        self._close_socket(closing)

    def _close_socket(self, closing: CloseReason) -> None:
        self.closing = closing
        telemetry.connection_closed(closing.reason, forces_resync=closing.forces_resync)
        self._host.log(self, "gateway.connection_closed", reason=closing.reason)
        self._socket.close(closing.code, closing.reason)
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._socket.abort)

    # --- authentication and opening ---------------------------------------------------

    def _authenticate(self, frame: Authenticate) -> None:
        """Judge the credential of the first frame like one in a header."""
        try:
            if refusal := refusal_of(frame, self._deps.session_settings):
                raise refusal
            principal = self._deps.verify(frame.payload.token)
            self._identify(principal)
        except HoldfastError as error:
            self._refuse(error, frame.request_id)
            return
        self.device_id = frame.payload.device_id or self.device_id
        self.open(principal, frame.request_id)

    def _refuse(self, error: HoldfastError, request_id: str | None) -> None:
        self.write(encode_frame(error_payload(error), request_id))
        if error.retryable:
            self.close(CloseReason.OVERLOADED, delay_ms=self._host.spread_ms())
        elif error.details.get("expired"):
            self.close(CloseReason.TOKEN_EXPIRED)
        else:
            self.close(CloseReason.UNAUTHORIZED)

    def _invalid(self, error: InvalidMessage, request_id: str | None, now: float) -> None:
        if not self.authenticated:
            self._refuse(error, request_id)
        else:
            self.do(self.session.on_invalid_frame(error, request_id, now))

    def open(self, principal: Principal, request_id: str | None = None) -> None:
        """Open the session of an authenticated client.

        It goes on the roster before its memberships are read, so that no membership
        event is missed. A revocation looks for connections on the roster, so one that
        came since the handshake is checked here.
        """
        if (refusal := self._deps.refusal(principal, self.device_id)) is not None:
            self._refuse(refusal, request_id)
            return
        now = self._deps.clock.monotonic()
        self.session = self._session_type(
            self._deps.session_settings,
            self.connection_id,
            principal,
            self.device_id,
            now,
            self._expiry(principal),
            self._deps.rng,
        )
        self.authenticated = True
        del self._identify, self._session_type
        self._host.on_opened(self, now)
        self._hold(_Hold.OPENING)
        self._host.start(self, self._establish(self.session))

    def _queue_early_frame(self, data: bytes | memoryview) -> None:
        """Keep a frame that was read before ``connection_established`` was queued.

        Reading is paused by then, but one read may hold several frames.
        """
        early_bytes = len(data) + sum(map(len, self._early))
        if len(self._early) >= EARLY_FRAMES_MAX or early_bytes > EARLY_BYTES_MAX:
            self.protocol_broken("too many frames before `connection_established`")
        else:
            self._early = (*self._early, bytes(data))

    def _answer_early(self, error: HoldfastError) -> None:
        """Before a close: refuse the requests that waited for the opening."""
        early, self._early = self._early, ()
        for request_id in filter(None, map(request_id_of, early)):
            self.write(encode_frame(error_payload(error), request_id))

    async def _establish(self, session: Session) -> None:
        try:
            memberships = await self._host.read_memberships(self)
        except HoldfastError as error:
            self.write(encode_frame(error_payload(error)))
            self._answer_early(error)
            self.close(CloseReason.UPSTREAM_FAILURE)
            return
        if self.closing is None:
            self.established = True
            self.do(session.establish(memberships, timestamp(self._deps.clock.now())))
            self._host.on_established(self)
            early, self._early = self._early, ()
            for data in early:
                self.frame_received(data)
            self._release(_Hold.OPENING)

    def _verify(self, effect: effects.Verify) -> None:
        now = self._deps.clock.monotonic()
        try:
            principal = self._deps.verify(effect.credential)
            if principal.user != self.session.user:
                raise Unauthorized("the token belongs to another user")
            if refusal := self._deps.refusal(principal, self.device_id):
                raise refusal
        except HoldfastError as error:
            self.do(self.session.on_token_checked(effect.token, error, now))
            return
        self.do(self.session.on_token_checked(effect.token, self._expiry(principal), now))
        held, self.session.principal = self.session.principal, principal
        if (principal.scopes, principal.chats) != (held.scopes, held.chats):
            self.close(
                CloseReason.ROTATION, message="the new token allows other things: reconnect with it"
            )

    def _expiry(self, principal: Principal) -> float | None:
        """When the credential expires, as a monotonic time."""
        if principal.expires_at is None:
            return None
        return self._deps.clock.monotonic() + principal.expires_at - self._deps.clock.now()
