"""One connection: carries out the effects of its session; decides nothing itself.

It knows no WebSocket library: frames come in through its methods, bytes leave through ``Socket``. So a
simulation drives the same code that serves real sockets.

    waiting for a credential ──authenticate──> opening ──memberships read──> open ──> closed
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
from holdfast.session.outbound import OutboundBuffer
from holdfast.session.responses import closing_frame
from holdfast.session.session import Session
from holdfast.session.validation import refusal_of
from holdfast.session.work_rate import WorkRate
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.codec import decode_client_frame, encode_frame, error_payload, pong_frame, request_id_of
from holdfast.wire.frames import Authenticate

WRITE_BYTES = 64 * 1024
"""How much is taken from the lanes at a time: enough for one system call, little to be lost in a transport."""
EARLY_FRAMES_MAX = 100
EARLY_BYTES_MAX = 256 * 1024
"""What may come before ``connection_established``, kept until the memberships are read."""
LOGGED = {SessionEvent.BUFFER_ABOVE_WARNING, SessionEvent.SLOW_CONSUMER_WARNED, SessionEvent.SLOW_CONSUMER_RECOVERED}
"""The signs of a client in trouble, which are rare; the others are only counted."""


class _Hold(Flag):
    """Why a socket is not read."""

    OPENING = auto()
    CONTROL_LANE = auto()
    WORK = auto()


class Connection:
    """The shell around one session."""

    session_type = Session

    __slots__ = (
        "_early",
        "_holds",
        "_host",
        "_identify",
        "_opened_at",
        "_plane",
        "_pong",
        "_socket",
        "_work",
        "closing",
        "connection_id",
        "deliveries",
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
        plane: GatewayDeps,
        host: ConnectionHost,
        socket: Socket,
        device_id: str,
        identify: Callable[[Principal], None] = lambda principal: None,
    ) -> None:
        """``identify`` hears who is here if only the first frame says so, and may raise a refusal."""
        self._identify = identify
        self._plane = plane
        self._host = host
        self._socket = socket
        self._opened_at = plane.clock.monotonic()
        self._early: Sequence[bytes] = ()
        self._work = WorkRate(plane.limits.backpressure.inbound, self._opened_at)
        self._holds = _Hold(0)
        self._pong: bytes | None = None
        """The answer to the last ping, while the socket does not take it."""
        self.connection_id = plane.ids.new("conn_")
        self.device_id = device_id or self.connection_id
        self.established = False
        self.session: Session | None = None
        self.deliveries: OutboundBuffer
        """The outbound side of the session, from when there is one."""
        self.write = socket.write
        self.paused = False
        self.dirty = False
        self.due = 0.0
        """When ``tick`` is to be called; 0 after anything that may have brought it forward."""
        self.closing: CloseReason | None = None
        self.leaving = False
        """Nothing more is taken from the client; it closes when what it sent is answered."""

    @property
    def owed(self) -> Session:
        """The session of a connection that is on the roster."""
        assert self.session is not None
        return self.session

    @property
    def user(self) -> User:
        return self.owed.user

    @property
    def chats(self) -> Collection[str]:
        return self.owed.chats

    def reads(self, chat_id: str) -> bool:
        return self.owed.principal.reads(chat_id)

    @property
    def open_requests(self) -> int:
        """What the client has sent and waits to be answered."""
        return self.session.open_requests if self.session is not None else 0

    @property
    def _marked_as(self) -> str:
        """The device of its watermarks. One without a name is another one each time it comes, so all share a mark."""
        return "" if self.device_id == self.connection_id else self.device_id

    @property
    def waiting_bytes(self) -> int:
        """What the client has not taken: of the lanes, and of what was written, for a page leaves its lane at once."""
        in_lanes = self.session.waiting_bytes if self.session is not None else 0
        return in_lanes + (self._socket.unsent if self.paused else 0)

    # --- what the socket tells -------------------------------------------------------------------------

    def frame_received(self, data: bytes | memoryview) -> None:
        """A whole text message from the client."""
        if self.closing is not None or self.leaving:
            return
        if self.session is not None and not self.established:
            self._wait_for_hello(data)
            return
        now = self._plane.clock.monotonic()
        try:
            frame = decode_client_frame(data)
        except InvalidMessage as error:
            telemetry.frame_refused()
            self._invalid(error, request_id_of(data), now)
            return
        if self.session is None:
            if isinstance(frame, Authenticate):
                self._authenticate(frame)
            else:
                self._refuse(Unauthorized("the first frame must be `authenticate`"), frame.request_id)
            return
        self.do(self.session.receive(frame, now))

    def ping_received(self, body: bytes) -> None:
        """Answer a ping within the rate of frames. While the socket is not read only the last one is remembered."""
        if self.closing is not None:
            return
        if self.session is not None and not self.session.on_ping(self._plane.clock.monotonic()):
            return
        if self.paused:
            self._pong = body
        else:
            self.write(pong_frame(body))

    def work_done(self, work: int) -> None:
        """So many frames, at least one, were read at once and handled. Above the work rate reading pauses."""
        if self.session is not None:
            self.session.heard()
        if self.closing is None and self._work.spend(work, self._plane.clock.monotonic()):
            self._hold(_Hold.WORK)
            self.due = 0.0
            telemetry.session_noticed(SessionEvent.WORK_RATE_EXCEEDED.value)

    def protocol_broken(self, message: str) -> None:
        """The client broke the WebSocket protocol or a frame was too large: there is no way back."""
        self.close(CloseReason.PROTOCOL_ERROR, message=message)

    def writing_paused(self) -> None:
        self.paused = True

    def writing_resumed(self) -> None:
        self.paused = False
        self._host.wake(self)

    def lost(self) -> None:
        """The socket is gone, or the client has ended it; sends on their way go on, their answers go nowhere."""
        if self.closing is None:
            telemetry.connection_lost()
        self.closing = self.closing or CloseReason.IDLE_TIMEOUT
        self._host.lost(self)

    # --- what the gateway tells ------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what waits, as long as the socket takes it. One write carries all frames of a turn."""
        self.dirty = False
        session = self.session
        if self.closing is not None or self.paused:
            return
        if self._pong is not None:
            body, self._pong = self._pong, None
            self.write(pong_frame(body))
        if session is None:
            return
        if (run := session.take_single()) is not None:
            self.write(run)
            return
        while not self.paused and (chunks := session.take(WRITE_BYTES)):
            self.write(chunks[0] if len(chunks) == 1 else b"".join(chunks))
            if steps := session.on_written(self._plane.clock.monotonic()):
                self.do(steps)

    def tick(self, now: float) -> None:
        """Let time pass: the credential's deadline before there is a session, the session's timers after."""
        if self._work.paused and self.closing is None:
            self._judge_work(now)
        if self.session is None:
            self.due = self._opened_at + self._plane.limits.timeouts.authentication_seconds
            if self.closing is None and now >= self.due:
                self.close(CloseReason.UNAUTHORIZED, message="no `authenticate` frame in time")
        else:
            if now >= self.session.next_tick:
                self.do(self.session.tick(now, self._socket.transmission()))
            self.due = self.session.next_tick
        if self._work.paused:
            self.due = 0.0

    def _judge_work(self, now: float) -> None:
        """Reading is paused: go on if the rate allows it, close if this has lasted too long."""
        if self._work.is_exceeded(now):
            if self.session is None:
                self.close(CloseReason.UNAUTHORIZED, message="too many frames before authentication")
            else:
                window = self._plane.limits.backpressure.inbound.work_pause_window_seconds
                self.close(CloseReason.RATE_LIMITED, delay_ms=int(window * 1000) + self._host.spread_ms())
        elif self._work.resume(now):
            self._release(_Hold.WORK)

    def close(self, closing: CloseReason, *, delay_ms: int = 0, message: str | None = None) -> None:
        """Answer what is open, say why, close. Safe to call twice."""
        if self.closing is not None:
            return
        self._answer_early(Unavailable(f"the connection closes: {closing.reason}"))
        if self.session is not None:
            self.do(self.session.close(closing, delay_ms, message))
            return
        self.write(encode_frame(closing_frame(closing, message, delay_ms, {})))
        self._close_socket(closing)

    def take_no_more(self) -> None:
        """Read nothing more, and drop what was read: whoever calls this closes the connection within a moment."""
        self.leaving = True
        self._socket.pause_reading()

    def abort(self) -> None:
        """Its session is broken beyond a farewell: the client reconnects and resumes."""
        self._socket.abort()

    # --- carrying out effects --------------------------------------------------------------------------

    def do(self, steps: Effects) -> None:
        """Carry out what the session asked for, in order."""
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
                    self._plane.watermarks.delivered(
                        self.user, self._marked_as, effect.chat_id, effect.epoch, effect.sequence
                    )
                case effects.WasRead():
                    self._plane.watermarks.read(
                        self.user, self._marked_as, effect.chat_id, effect.epoch, effect.sequence
                    )
                case effects.IsTyping():
                    self._host.typing(self.user, effect.chat_id, effect.active)
                case effects.PauseReading():
                    self._hold(_Hold.CONTROL_LANE)
                case effects.ResumeReading():
                    self._release(_Hold.CONTROL_LANE)
                case effects.Emit():
                    telemetry.session_noticed(effect.sign.value)
                    if effect.sign in LOGGED:
                        self._host.log(self, effect.sign.value)
                case effects.Close():
                    self._close(effect.closing)
                case _:
                    assert_never(effect)

    def _hold(self, reason: _Hold) -> None:
        """Read no more from the socket, until every reason for that is gone."""
        self._holds |= reason
        self._socket.pause_reading()

    def _release(self, reason: _Hold) -> None:
        self._holds &= ~reason
        if not self._holds and not self.leaving:
            self._socket.resume_reading()

    def _submit(self, effect: effects.Submit) -> None:
        plane = self._plane
        deadline = plane.clock.monotonic() + plane.limits.timeouts.durability_rpc_seconds
        answer = partial(self._answered, effect.token)
        plane.sends.submit(effect.body, self.owed.user, self.connection_id, deadline, answer)

    def _answered(self, token: int, outcome: Outcome) -> None:
        if self.session is not None and self.closing is None:
            self.do(self.session.on_send_result(token, outcome, self._plane.clock.monotonic()))

    async def _read(self, effect: effects.Fetch | effects.FetchResume) -> None:
        """Read a page for the session; one at a time, so a slow reader holds back only itself."""
        session, history = self.owed, self._plane.history
        result: Page | ResumeRead | HoldfastError
        try:
            if isinstance(effect, effects.Fetch):
                chat_id, proof = effect.chat_id, effect.proofs.get(effect.chat_id)
                result = await history.sync(session.user, chat_id, effect.cursor, effect.limit, effect.asked_at, proof)
            else:
                only = session.principal.chats
                result = await history.resume(session.user, effect.cursors, effect.asked_at, only, effect.proofs)
        except HoldfastError as error:
            result = error
        steps = session.on_page(effect.token, result, self._plane.clock.monotonic())
        if self.closing is None:
            self.do(steps)

    def _close(self, closing: CloseReason) -> None:
        """The session has put its last words on the control lane: write them, whatever the socket says."""
        assert self.session is not None
        chunks = self.session.take(WRITE_BYTES)
        if chunks:
            self.write(b"".join(chunks))
        self._close_socket(closing)

    def _close_socket(self, closing: CloseReason) -> None:
        self.closing = closing
        telemetry.connection_closed(closing.reason)
        self._host.log(self, "connection_closed", reason=closing.reason)
        self._socket.close(closing.code, closing.reason)
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._socket.abort)

    # --- coming in -------------------------------------------------------------------------------------

    def _authenticate(self, frame: Authenticate) -> None:
        """The credential and device that no header could carry, judged as a header's would be."""
        try:
            if refusal := refusal_of(frame, self._plane.session_limits):
                raise refusal
            principal = self._plane.verify(frame.payload.token)
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
        if self.session is None:
            self._refuse(error, request_id)
        else:
            self.do(self.session.on_invalid_frame(error, request_id, now))

    def open(self, principal: Principal, request_id: str | None = None) -> None:
        """Authenticated: on the roster first, then the memberships, so that no event can pass in between.

        Whoever was cut off since the handshake was judged is not on the roster, where a revocation would look.
        """
        if (refusal := self._plane.refusal(principal, self.device_id)) is not None:
            self._refuse(refusal, request_id)
            return
        now = self._plane.clock.monotonic()
        del self._identify
        self.session = self.session_type(
            self._plane.session_limits,
            self.connection_id,
            principal,
            self.device_id,
            now,
            self._expiry(principal),
            self._plane.rng,
        )
        self.deliveries = self.session.deliveries
        self._host.opened(self, now)
        self._hold(_Hold.OPENING)
        self._host.start(self, self._establish(self.session))

    def _wait_for_hello(self, data: bytes | memoryview) -> None:
        """A client that did not wait for ``connection_established``: reading is paused, but some was read already."""
        early_bytes = len(data) + sum(map(len, self._early))
        if len(self._early) >= EARLY_FRAMES_MAX or early_bytes > EARLY_BYTES_MAX:
            self.protocol_broken("too many frames before `connection_established`")
        else:
            self._early = (*self._early, bytes(data))

    def _answer_early(self, error: HoldfastError) -> None:
        """Nothing of what was asked before the hello was begun: say so, before the connection closes."""
        early, self._early = self._early, ()
        for request_id in filter(None, map(request_id_of, early)):
            self.write(encode_frame(error_payload(error), request_id))

    async def _establish(self, session: Session) -> None:
        try:
            memberships = await self._plane.history.memberships(session.user)
        except HoldfastError as error:
            self.write(encode_frame(error_payload(error)))
            self._answer_early(error)
            self.close(CloseReason.UPSTREAM_FAILURE, delay_ms=self._host.spread_ms())
            return
        if self.closing is None:
            self.established = True
            self.do(session.established(memberships, timestamp(self._plane.clock.now())))
            self._host.established(self)
            early, self._early = self._early, ()
            for data in early:
                self.frame_received(data)
            self._release(_Hold.OPENING)

    def _verify(self, effect: effects.Verify) -> None:
        assert self.session is not None
        now = self._plane.clock.monotonic()
        try:
            principal = self._plane.verify(effect.credential)
            if principal.user != self.session.user:
                raise Unauthorized("the token belongs to another user")
            if refusal := self._plane.refusal(principal, self.device_id):
                raise refusal
        except HoldfastError as error:
            self.do(self.session.on_token_checked(effect.token, error, now))
            return
        self.do(self.session.on_token_checked(effect.token, self._expiry(principal), now))
        held, self.session.principal = self.session.principal, principal
        if (principal.scopes, principal.chats) != (held.scopes, held.chats):
            self.close(CloseReason.ROTATION, message="the new token allows other things: reconnect with it")

    def _expiry(self, principal: Principal) -> float | None:
        """The credential's end as a monotonic time."""
        if principal.expires_at is None:
            return None
        return self._plane.clock.monotonic() + principal.expires_at - self._plane.clock.now()
