"""The client's side of the protocol: frames, time and calls in, actions out. (Pure.)

The shell carries out the actions in order and calls ``tick`` at ``wake_at``. Events for
the application wait in ``inbox``. Nothing here waits, reads a clock or touches a
socket, so tests can try every interleaving of frames, faults and time. All times are
monotonic seconds.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from typing import assert_never

from holdfast.client.chat_copy import ChatCopy
from holdfast.client.chats import ChatCopies, Reads
from holdfast.client.events import (
    Announced,
    ChatReset,
    ClientEvent,
    Drop,
    Keep,
    MachineAction,
    Online,
    RenewToken,
    SendRefused,
    Sent,
    Settled,
    Synced,
    Warned,
    Write,
)
from holdfast.client.inbox import Inbox
from holdfast.client.outbox import Outbox, OutboxEntry
from holdfast.client.reconnect import refusal
from holdfast.client.session import NEVER, ClientSession, FramePace, Resuming, Sync
from holdfast.client.settings import ClientSettings
from holdfast.errors import HoldfastError
from holdfast.message import Cursor, Message, Page
from holdfast.wire.codec import ServerFrame
from holdfast.wire.frames import (
    Ack,
    AckBody,
    AnyClientFrame,
    Authenticate,
    AuthenticateBody,
    Authenticated,
    ChatBody,
    ConnectionClosing,
    ConnectionEstablished,
    CursorClaim,
    Error,
    Heartbeat,
    HeartbeatAck,
    MessageAck,
    Presence,
    Read,
    ReadBody,
    Receipt,
    ReplyTextDelta,
    ReplyTextState,
    Resume,
    ResumeBody,
    Resumed,
    Resync,
    SendBody,
    SendMessage,
    SyncRequest,
    Typing,
    TypingStart,
    TypingStop,
)

_GONE = frozenset({"NOT_A_MEMBER", "NOT_FOUND", "FORBIDDEN"})
MANY_CHATS = 50
"""From this many chats on, another resume pays: for thousands it takes ten frames."""


class Machine:
    """One device and its server, over all its connections, each a session."""

    def __init__(
        self,
        settings: ClientSettings,
        outbox: Outbox,
        cursors: Mapping[str, Cursor | CursorClaim],
        rng: random.Random,
        follow: Collection[str] | None = None,
    ) -> None:
        self.inbox = Inbox(settings.buffer_messages_max)
        self.outbox = outbox
        self._chats = ChatCopies(cursors, self.inbox, follow)
        self._settings = settings
        self._rng = rng
        self._session: ClientSession | None = None
        self.listens = False
        self._page_messages = settings.page_messages
        self._resume_chats = settings.resume_chats_per_frame
        self._reads = Reads()
        self._ack_at = 0.0
        self._requests = 0
        self._actions: list[MachineAction] = []

    # The connection

    def on_opened(self, expires_at: float | None, now: float) -> list[MachineAction]:
        """A socket is open; ``expires_at``: when its token expires."""
        self._session = ClientSession(now)
        self._expires(self._session, expires_at, now)
        return self._done(now)

    def on_disconnected(self) -> None:
        """The connection has ended. Unanswered requests will be repeated."""
        self._session = None
        self.outbox.on_disconnected()
        self._chats.on_disconnected()
        self.inbox.on_disconnected()
        self._reads.repeat()

    def receive(self, frame: ServerFrame, now: float) -> list[MachineAction]:
        """Handle one frame of the server; the shell calls this in order of arrival."""
        session = self._session
        if session is None:
            return []
        session.received_at = now
        match frame.payload:
            case Message() as message:
                self._actions += self._chats.on_push(message, now)
            case MessageAck() as ack:
                self._on_ack(ack)
            case Page() as page:
                self._on_page(session, frame.request_id, page, now)
            case ConnectionEstablished() as established:
                self._on_established(session, established, now)
            case Resumed() as resumed:
                self._on_resumed(session, frame.request_id, resumed, now)
            case Resync(chats=chats):
                for chat in chats:
                    self._actions += self._chats.on_head(
                        chat.chat_id, None, chat.head, now, certain=True
                    )
            case Heartbeat(heads=heads):
                self._write(HeartbeatAck())
                for chat_id, (epoch, head) in heads.items():
                    self._actions += self._chats.on_head(chat_id, epoch, head, now)
            case Typing() | Presence() | Receipt() as ephemeral:
                self.inbox.put_ephemeral(ephemeral)
            case ReplyTextDelta() | ReplyTextState() as reply:
                if self._chats.follows(reply.chat_id):
                    self.inbox.put_reply(reply)
            case Error() as error:
                self._on_error(session, frame.request_id, error, now)
            case ConnectionClosing() as closing:
                self._actions.append(Announced(closing))
                session.drop_at = now + self._settings.closing_timeout_seconds
            case Authenticated():
                pass  # the renewed token is in force
            case other:
                assert_never(other)
        return self._done(now)

    def on_partial_frame(self, now: float) -> list[MachineAction]:
        """A part of a frame arrived: the awaited reply is in it or behind it."""
        session = self._session
        if session is not None:
            session.received_at = session.partial_at = now
        return self._done(now)

    def on_token_renewed(
        self, token: str, device_id: str, expires_at: float | None, now: float
    ) -> list[MachineAction]:
        """The shell has a new token after RenewToken: send it on this connection."""
        if self._session is not None:
            self._write(
                Authenticate(request_id=self._request(), payload=AuthenticateBody(token, device_id))
            )
            self._expires(self._session, expires_at, now)
        return self._done(now)

    def leave(self, now: float) -> list[MachineAction]:
        """The application is about to leave: send the waiting acks."""
        self._ack_at = now
        return self._done(now)

    def tick(self, now: float) -> list[MachineAction]:
        """Renew the token, check the deadlines, and start what has become due."""
        session = self._session
        if session is not None:
            if now >= session.renew_at:
                session.renew_at = NEVER
                self._actions.append(RenewToken())
            self._check_deadlines(session, now)
        return self._done(now)

    def wake_at(self) -> float | None:
        """When ``tick`` is next needed; None while there is no connection."""
        session = self._session
        if session is None:
            return None
        times = [
            session.renew_at,
            session.drop_at,
            session.silent_at,
            self._answer_due(session),
        ]
        if session.accepted:
            times.append(self.outbox.next_start())
            times.append(max(self._next_question(session), session.pace.until))
        return min(times)

    def _next_question(self, session: ClientSession) -> float:
        """When the next frame that is not a send may be due."""
        times = [self._ack_at] if self._may_ack(session) else []
        if self._reads:
            times.append(session.received_at)
        if session.resuming is not None and session.resuming.asked_at == NEVER:
            times.append(session.resuming.at)
        if self._may_sync(session):
            times.append(self._chats.next_sync_at())
        return min(times, default=NEVER)

    # The application

    def send(self, entry: OutboxEntry, now: float) -> list[MachineAction]:
        """Queue a new entry; it must be on disk already."""
        self.outbox.add(entry)
        return self._done(now)

    def listen(self, now: float) -> list[MachineAction]:
        """The application reads events from now on: resume and pull."""
        self.listens = True
        if self._session is not None and self._session.resuming is not None:
            self._session.resuming.at = now
        return self._done(now)

    def on_consumed(
        self, event: ClientEvent, copy: ChatCopy | None, now: float
    ) -> list[MachineAction]:
        """The application is done with an event from the inbox: its cursor may move."""
        if isinstance(event, ChatReset):
            self._reads.on_reset(event.chat_id)
        self._actions += self._chats.on_consumed(event, copy)
        return self._done(now)

    def on_kept(self, kept: Iterable[Keep], now: float) -> list[MachineAction]:
        """These cursors are on disk, so they may be acked."""
        for keep in kept:
            self._chats.on_kept(keep)
        return self._done(now)

    def typing(self, chat_id: str, active: bool, now: float) -> list[MachineAction]:
        """Report that the user types, or has stopped; lost while offline."""
        if self._session is not None and self._session.accepted and self._session.pace.allows(now):
            body = ChatBody(chat_id)
            self._write(TypingStart(payload=body) if active else TypingStop(payload=body))
        return self._done(now)

    def read(self, chat_id: str, sequence: int, now: float) -> list[MachineAction]:
        """The user has read up to ``sequence``; offline, the highest is remembered."""
        self._reads.read(chat_id, sequence)
        return self._done(now)

    def report_refusal(self, entry: OutboxEntry, error: HoldfastError) -> None:
        """No caller waits for the refused send: report it as an event."""
        self.inbox.put(SendRefused(entry.chat_id, entry.client_message_id, entry.content, error))

    # Replies

    def _on_established(
        self, session: ClientSession, established: ConnectionEstablished, now: float
    ) -> None:
        session.accepted = True
        interval = established.heartbeat_interval_ms / 1000
        session.silence_seconds = interval + self._settings.silence_grace_seconds
        self._actions.append(Online(established))
        limits = established.limits
        self._page_messages = int(
            min(self._settings.page_messages, limits.get("page_messages_max", NEVER))
        )
        chats = min(
            self._settings.resume_chats_per_frame, limits.get("resume_chats_per_frame", NEVER)
        )
        self._resume_chats = int(chats)
        session.pace = FramePace(limits, now)
        session.resuming = Resuming(now if self.listens else NEVER)

    def _on_resumed(
        self, session: ClientSession, request_id: str | None, resumed: Resumed, now: float
    ) -> None:
        if session.resuming is not None and session.resuming.ends_with(request_id):
            session.resuming = None
        for chat_id in resumed.gone:
            self._actions += self._chats.on_gone(chat_id)
        for chat_id in resumed.joined:
            self._chats.on_joined(chat_id, now)
        for chat in resumed.chats:
            self._actions += self._chats.on_page(chat, now, known_head=0)
        session.resumed_many = sum(bool(chat.messages) for chat in resumed.chats) >= MANY_CHATS

    def _on_page(
        self, session: ClientSession, request_id: str | None, page: Page, now: float
    ) -> None:
        sync = session.sync
        if sync is not None and sync.request_id == request_id:
            session.sync = None
            self._actions += self._chats.on_page(page, now, sync.known_head)

    def _on_ack(self, ack: MessageAck) -> None:
        entry = self.outbox.settle(ack.chat_id, ack.client_message_id)
        if entry is not None:
            sent = Sent(
                ack.client_message_id,
                ack.message_id,
                ack.chat_id,
                ack.sequence,
                ack.created_at,
                ack.deduplicated,
            )
            self._actions.append(Settled(entry, sent))

    def _on_error(
        self, session: ClientSession, request_id: str | None, error: Error, now: float
    ) -> None:
        if error.code == "RATE_LIMITED":
            session.pace.hold(now + (error.retry_after_seconds or 1.0))
        entry = self.outbox.in_flight_under(request_id) if request_id is not None else None
        if entry is not None:
            self._send_failed(entry, error, now)
        elif session.sync is not None and session.sync.request_id == request_id:
            self._sync_failed(session, session.sync.chat_id, error, now)
        elif session.resuming is not None and session.resuming.has_asked(request_id):
            if session.resuming.ends_with(request_id):
                self._resume_failed(session, session.resuming, error, now)
        else:
            if error.code == "RATE_LIMITED":
                self._chats.repeat_acks()  # it had no reply: perhaps an ack or a read
                self._reads.repeat()
            elif error.code in _GONE:
                chat_id = str((error.details or {}).get("chat_id"))
                self._reads.on_refused(chat_id)
                self._chats.check_membership(chat_id, now)
            self.inbox.put_ephemeral(Warned(error.code, error.message))

    def _sync_failed(self, session: ClientSession, chat_id: str, error: Error, now: float) -> None:
        session.sync = None
        if error.code in _GONE:
            self._actions += self._chats.on_gone(chat_id)
        else:
            self._chats.sync_later(chat_id, now + (error.retry_after_seconds or 1.0))

    def _resume_failed(
        self, session: ClientSession, resuming: Resuming, error: Error, now: float
    ) -> None:
        """Retry on this connection: a new one would cost the server more.

        After a final refusal each known chat is pulled; heads name the unknown ones.
        """
        if error.retryable:
            resuming.failures += 1
            wait = self._settings.backoff.delay(
                resuming.failures, self._rng, error.retry_after_seconds
            )
            resuming.restart(now + wait)
        else:
            session.resuming = None
            self._chats.pull_all(now)
            self.inbox.put_ephemeral(Warned(error.code, error.message))

    def _send_failed(self, entry: OutboxEntry, error: Error, now: float) -> None:
        if error.retryable:
            everywhere = error.code == "RATE_LIMITED"
            self.outbox.defer(entry.chat_id, now, error.retry_after_seconds, everywhere)
        else:
            self.outbox.settle(entry.chat_id, entry.client_message_id)
            self._actions.append(Settled(entry, refusal(error)))
            if error.code in _GONE:
                self._chats.check_membership(entry.chat_id, now)

    # Frames to send

    def _done(self, now: float) -> list[MachineAction]:
        """Start everything that may start now; return all actions."""
        session = self._session
        if session is not None and session.accepted:
            self._start_sends(now)
            self._start_resume(session, now)
            self._send_acks(session, now)
            self._send_reads(session, now)
            self._start_sync(session, now)
            self._check_synced(session)
        actions, self._actions = self._actions, []
        return actions

    def _check_synced(self, session: ClientSession) -> None:
        if session.synced or session.resuming is not None:
            return
        if self._chats.caught_up(session.sync.chat_id if session.sync is not None else None):
            session.synced = True
            self._actions.append(Synced())

    def _start_sends(self, now: float) -> None:
        while (entry := self.outbox.start(now, f"{self._requests + 1}")) is not None:
            body = SendBody(
                entry.client_message_id, entry.chat_id, entry.content, entry.content_type
            )
            self._write(SendMessage(request_id=self._request(), payload=body))

    def _resume_again(self, session: ClientSession, now: float) -> None:
        """With many chats behind, a resume is faster than single pulls."""
        room = self.inbox.room * 2 >= self._settings.buffer_messages_max
        if (
            session.resumed_many
            and room
            and self._may_sync(session)
            and self._chats.behind(now) >= MANY_CHATS
        ):
            session.resuming = Resuming(now)

    def _start_resume(self, session: ClientSession, now: float) -> None:
        self._resume_again(session, now)
        resuming = session.resuming
        if resuming is None or now < resuming.at:
            return
        if resuming.frames is None:
            resuming.begin(self._chats.resume_frames(self._resume_chats))
        while resuming.frames and session.pace.allows(now):
            cursors = resuming.frames.popleft()
            request_id = self._request()
            self._write(
                Resume(
                    request_id=request_id, payload=ResumeBody(cursors, more=bool(resuming.frames))
                )
            )
            resuming.on_asked(request_id, now)

    def _may_sync(self, session: ClientSession) -> bool:
        """One page in flight at a time, after the resume, with room for half a page."""
        room = min(self._page_messages, self._settings.buffer_messages_max) // 2
        return session.sync is None and session.resuming is None and self.inbox.room > room

    def _start_sync(self, session: ClientSession, now: float) -> None:
        at = self._chats.next_sync_at() if self._may_sync(session) else NEVER
        if now < at or not session.pace.allows(now):
            return
        found = self._chats.next_sync(now, min(self._page_messages, self.inbox.room))
        if found is not None:
            body, known_head = found
            session.sync = Sync(body.chat_id, self._request(), known_head, now)
            self._write(SyncRequest(request_id=session.sync.request_id, payload=body))

    def _may_ack(self, session: ClientSession) -> bool:
        """Before the resume is answered, the server has sent nothing to be acked."""
        return session.resuming is None and self._chats.has_acks

    def _send_acks(self, session: ClientSession, now: float) -> None:
        if now < self._ack_at or not self._may_ack(session):
            return
        self._ack_at = now + self._settings.ack_interval_seconds
        for _ in range(self._settings.acks_per_flush_max):
            if not self._chats.has_acks or not session.pace.allows(now):
                return
            chat_id, cursor = self._chats.next_ack()
            self._write(Ack(payload=AckBody(chat_id, cursor.epoch, cursor.sequence)))

    def _send_reads(self, session: ClientSession, now: float) -> None:
        while self._reads and session.pace.allows(now):
            self._write(Read(payload=ReadBody(*self._reads.next_read())))

    def _check_deadlines(self, session: ClientSession, now: float) -> None:
        if now >= session.drop_at:
            self._actions.append(Drop("the server announced its closing and did not close"))
        elif now >= session.silent_at:
            self._actions.append(Drop("the server is silent"))
        elif now >= self._answer_due(session):
            self._actions.append(Drop("the server does not answer"))

    def _answer_due(self, session: ClientSession) -> float:
        asked_at = min(session.waits_since(), self.outbox.oldest_in_flight())
        return max(asked_at, session.partial_at) + self._settings.reply_timeout_seconds

    def _expires(self, session: ClientSession, expires_at: float | None, now: float) -> None:
        if expires_at is not None:
            margin = min(self._settings.refresh_before_expiry_seconds, (expires_at - now) / 2)
            session.renew_at = max(now + 1.0, expires_at - margin)

    def _write(self, frame: AnyClientFrame) -> None:
        self._actions.append(Write(frame))

    def _request(self) -> str:
        self._requests += 1
        return f"{self._requests}"
