"""The client's side of the protocol: frames, time and the application's wishes in, actions out. (Pure.)

The shell carries the actions out in order, in a ``match`` that ends in ``assert_never``, and calls ``tick`` at
``wake_at``. What the application gets waits in ``inbox``. Nothing here waits, reads a clock or touches a socket,
so every interleaving of frames, faults and time can be tested as values. All times are monotonic seconds.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from typing import assert_never

from holdfast.client.actions import Action, Announced, Drop, Keep, Online, RenewToken, Settled, Write
from holdfast.client.chats import Chats
from holdfast.client.cursors import Copy
from holdfast.client.events import ChatReset, Event, SendRefused, Sent, Warned
from holdfast.client.inbox import Inbox
from holdfast.client.link import NEVER, STILL_HERE_SHARE, Link, Pace, Resuming, Sync
from holdfast.client.outbox import Entry, Outbox
from holdfast.client.refusals import refusal
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
    Error,
    Heartbeat,
    HeartbeatAck,
    MessageAck,
    Presence,
    Read,
    ReadBody,
    Receipt,
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


class Machine:
    """One device's attachment to the server, over all its connections."""

    def __init__(
        self,
        settings: ClientSettings,
        outbox: Outbox,
        cursors: Mapping[str, Cursor],
        rng: random.Random,
        follow: Collection[str] | None = None,
    ) -> None:
        self.inbox = Inbox(settings.buffer_messages_max)
        self.outbox = outbox
        self._chats = Chats(cursors, self.inbox, follow)
        self._settings = settings
        self._rng = rng
        self._link: Link | None = None
        self.listens = False
        self._page_messages = settings.page_messages
        self._resume_chats = settings.resume_chats_per_frame
        self._reads: dict[str, int] = {}
        self._reads_said_here: dict[str, int] = {}
        self._ack_at = 0.0
        self._requests = 0
        self._actions: list[Action] = []

    # The connection

    def opened(self, expires_at: float | None, now: float) -> list[Action]:
        """There is a socket; ``expires_at``: when its token ends."""
        self._link = Link(now)
        self._expires(self._link, expires_at, now)
        return self._done(now)

    def disconnected(self) -> None:
        """The connection is gone. What was asked and not answered will be asked again."""
        self._link = None
        self.outbox.disconnected()
        self._chats.disconnected()
        self._owe_reads_again()

    def receive(self, frame: ServerFrame, now: float) -> list[Action]:
        """One frame of the server, in the order in which they came."""
        link = self._link
        if link is None:
            return []
        link.heard_at = now
        match frame.payload:
            case Message() as message:
                self._actions += self._chats.pushed(message, now)
            case MessageAck() as ack:
                self._acked(ack)
            case Page() as page:
                self._page(link, frame.request_id, page, now)
            case ConnectionEstablished() as established:
                self._established(link, established, now)
            case Resumed() as resumed:
                self._resumed(link, frame.request_id, resumed, now)
            case Resync(chats=chats):
                for chat in chats:
                    self._actions += self._chats.heard_of(chat.chat_id, None, chat.head, now, certain=True)
            case Heartbeat(heads=heads):
                self._say_here(link, now)
                for chat_id, (epoch, head) in heads.items():
                    self._actions += self._chats.heard_of(chat_id, epoch, head, now)
            case Typing() | Presence() | Receipt() as ephemeral:
                self.inbox.tell(ephemeral)
            case Error() as error:
                self._failed(link, frame.request_id, error, now)
            case ConnectionClosing() as closing:
                self._actions.append(Announced(closing))
                link.drop_at = now + self._settings.closing_timeout_seconds
            case Authenticated():
                pass  # the renewed token is in force
            case other:
                assert_never(other)
        return self._done(now)

    def coming(self, now: float) -> list[Action]:
        """Bytes came and left a frame unfinished: what we wait for may be that frame, or be behind it."""
        link = self._link
        if link is not None:
            link.heard_at = link.coming_at = now
            if now >= link.said_at + link.still_here_seconds and link.pace.allows(now):
                self._say_here(link, now)
        return self._done(now)

    def renewed(self, token: str, device_id: str, expires_at: float | None, now: float) -> list[Action]:
        """A new token, in answer to RenewToken: hand it to the server in band."""
        if self._link is not None:
            self._write(Authenticate(request_id=self._request(), payload=AuthenticateBody(token, device_id)))
            self._expires(self._link, expires_at, now)
        return self._done(now)

    def leave(self, now: float) -> list[Action]:
        """The application is about to go: say the acks that waited for their turn."""
        self._ack_at = now
        return self._done(now)

    def tick(self, now: float) -> list[Action]:
        """Do what time alone asks for."""
        link = self._link
        if link is not None:
            if now >= link.renew_at:
                link.renew_at = NEVER
                self._actions.append(RenewToken())
            self._check_deadlines(link, now)
        return self._done(now)

    def wake_at(self) -> float | None:
        """When ``tick`` is next needed; None while there is no connection."""
        link = self._link
        if link is None:
            return None
        times = [link.renew_at, link.drop_at, link.heard_at + link.silence_seconds, self._answer_due(link)]
        if link.accepted:
            times.append(self.outbox.next_start())
            times.append(max(self._next_question(link), link.pace.until))
        return min(times)

    def _next_question(self, link: Link) -> float:
        """When there is something to say that is no send."""
        times = [self._ack_at] if self._chats.owes_acks else []
        if self._reads:
            times.append(link.heard_at)
        if link.resuming is not None and link.resuming.asked_at == NEVER:
            times.append(link.resuming.at)
        if self._may_sync(link):
            times.append(self._chats.next_sync_at())
        return min(times, default=NEVER)

    # The application

    def send(self, entry: Entry, now: float) -> list[Action]:
        """A new entry, already on disk."""
        self.outbox.add(entry)
        return self._done(now)

    def listen(self, now: float) -> list[Action]:
        """The application wants what comes. Before, nothing is asked for: nobody would take it, nothing be acked."""
        self.listens = True
        if self._link is not None and self._link.resuming is not None:
            self._link.resuming.at = now
        return self._done(now)

    def moved_past(self, event: Event, copy: Copy | None, now: float) -> list[Action]:
        """The application is done with an event it took from the inbox: only now may its cursor move."""
        if isinstance(event, ChatReset):  # what it read before was numbered otherwise
            self._reads.pop(event.chat_id, None)
            self._reads_said_here.pop(event.chat_id, None)
        self._actions += self._chats.moved_past(event, copy)
        return self._done(now)

    def kept(self, kept: Iterable[Keep], now: float) -> list[Action]:
        """These are on disk."""
        for keep in kept:
            self._chats.kept(keep)
        return self._done(now)

    def typing(self, chat_id: str, active: bool, now: float) -> list[Action]:
        """Ephemeral: lost while offline."""
        if self._link is not None and self._link.accepted and self._link.pace.allows(now):
            body = ChatBody(chat_id)
            self._write(TypingStart(payload=body) if active else TypingStop(payload=body))
        return self._done(now)

    def read(self, chat_id: str, sequence: int, now: float) -> list[Action]:
        """The user has read up to ``sequence``; while offline the highest is remembered."""
        self._reads[chat_id] = max(sequence, self._reads.get(chat_id, 0))
        return self._done(now)

    def refused_unheard(self, entry: Entry, error: HoldfastError) -> None:
        """Nobody waited for the send that was refused: tell the application as an event."""
        self.inbox.put(SendRefused(entry.chat_id, entry.client_message_id, entry.content, error))

    # Answers

    def _established(self, link: Link, established: ConnectionEstablished, now: float) -> None:
        link.accepted = True
        interval = established.heartbeat_interval_ms / 1000
        link.silence_seconds = interval + self._settings.silence_grace_seconds
        link.still_here_seconds = interval * STILL_HERE_SHARE
        self._actions.append(Online(established))
        limits = established.limits
        self._page_messages = int(min(self._settings.page_messages, limits.get("page_messages_max", NEVER)))
        chats = min(self._settings.resume_chats_per_frame, limits.get("resume_chats_per_frame", NEVER))
        self._resume_chats = int(chats)
        link.pace = Pace(limits, now)
        link.resuming = Resuming(now if self.listens else NEVER)

    def _resumed(self, link: Link, request_id: str | None, resumed: Resumed, now: float) -> None:
        if link.resuming is not None and link.resuming.ends_with(request_id):
            link.resuming = None
        for chat_id in resumed.gone:
            self._actions += self._chats.gone(chat_id)
        for chat_id in resumed.joined:
            self._chats.joined(chat_id, now)
        for chat in resumed.chats:
            self._actions += self._chats.settle(chat, now, heard=0)

    def _page(self, link: Link, request_id: str | None, page: Page, now: float) -> None:
        sync = link.sync
        if sync is not None and sync.request_id == request_id:
            link.sync = None
            self._actions += self._chats.settle(page, now, sync.heard)

    def _acked(self, ack: MessageAck) -> None:
        entry = self.outbox.settle(ack.chat_id, ack.client_message_id)
        if entry is not None:
            sent = Sent(
                ack.client_message_id, ack.message_id, ack.chat_id, ack.sequence, ack.created_at, ack.deduplicated
            )
            self._actions.append(Settled(entry, sent))

    def _failed(self, link: Link, request_id: str | None, error: Error, now: float) -> None:
        if error.code == "RATE_LIMITED":
            link.pace.hold(now + (error.retry_after_seconds or 1.0))
        entry = self.outbox.in_flight_under(request_id) if request_id is not None else None
        if entry is not None:
            self._send_failed(entry, error, now)
        elif link.sync is not None and link.sync.request_id == request_id:
            self._sync_failed(link, link.sync.chat_id, error, now)
        elif link.resuming is not None and link.resuming.has_asked(request_id):
            if link.resuming.ends_with(request_id):
                self._resume_failed(link, link.resuming, error, now)
        else:
            if error.code == "RATE_LIMITED":
                self._chats.owe_again()  # it was a frame without an answer: an ack, perhaps, or a read
                self._owe_reads_again()
            elif error.code in _GONE:
                chat_id = str((error.details or {}).get("chat_id"))
                self._reads_said_here.pop(chat_id, None)
                self._chats.doubt(chat_id, now)
            self.inbox.tell(Warned(error.code, error.message))

    def _sync_failed(self, link: Link, chat_id: str, error: Error, now: float) -> None:
        link.sync = None
        if error.code in _GONE:
            self._actions += self._chats.gone(chat_id)
        else:
            self._chats.sync_later(chat_id, now + (error.retry_after_seconds or 1.0))

    def _resume_failed(self, link: Link, resuming: Resuming, error: Error, now: float) -> None:
        """The connection is good, and a new one would cost the server more: ask again on this one, later.

        Refused for good, every chat is pulled by itself; heads tell of those we do not know.
        """
        if error.retryable:
            resuming.failures += 1
            wait = self._settings.backoff.delay(resuming.failures, self._rng, error.retry_after_seconds)
            resuming.again(now + wait)
        else:
            link.resuming = None
            self._chats.pull_all(now)
            self.inbox.tell(Warned(error.code, error.message))

    def _send_failed(self, entry: Entry, error: Error, now: float) -> None:
        if error.retryable:
            everywhere = error.code == "RATE_LIMITED"
            self.outbox.defer(entry.chat_id, now, error.retry_after_seconds, everywhere)
        else:
            self.outbox.settle(entry.chat_id, entry.client_message_id)
            self._actions.append(Settled(entry, refusal(error)))
            if error.code in _GONE:
                self._chats.doubt(entry.chat_id, now)

    # What leaves

    def _done(self, now: float) -> list[Action]:
        """Start whatever may start now, and hand over everything there is to do."""
        link = self._link
        if link is not None and link.accepted:
            self._start_sends(now)
            self._start_resume(link, now)
            self._send_acks(link, now)
            self._send_reads(link, now)
            self._start_sync(link, now)
        actions, self._actions = self._actions, []
        return actions

    def _start_sends(self, now: float) -> None:
        while (entry := self.outbox.start(now, f"{self._requests + 1}")) is not None:
            body = SendBody(entry.client_message_id, entry.chat_id, entry.content, entry.content_type)
            self._write(SendMessage(request_id=self._request(), payload=body))

    def _start_resume(self, link: Link, now: float) -> None:
        resuming = link.resuming
        if resuming is None or now < resuming.at:
            return
        if resuming.frames is None:
            resuming.begin(self._chats.resume_frames(self._resume_chats))
        while resuming.frames and link.pace.allows(now):
            cursors = resuming.frames.popleft()
            request_id = self._request()
            self._write(Resume(request_id=request_id, payload=ResumeBody(cursors, more=bool(resuming.frames))))
            resuming.asked(request_id, now)

    def _may_sync(self, link: Link) -> bool:
        """One page in flight, after the resume, and only with room for half a page at least."""
        room = min(self._page_messages, self._settings.buffer_messages_max) // 2
        return link.sync is None and link.resuming is None and self.inbox.room > room

    def _start_sync(self, link: Link, now: float) -> None:
        at = self._chats.next_sync_at() if self._may_sync(link) else NEVER
        if now < at or not link.pace.allows(now):
            return
        found = self._chats.next_sync(now, min(self._page_messages, self.inbox.room))
        if found is not None:
            body, heard = found
            link.sync = Sync(body.chat_id, self._request(), heard, now)
            self._write(SyncRequest(request_id=link.sync.request_id, payload=body))

    def _send_acks(self, link: Link, now: float) -> None:
        if now < self._ack_at or not self._chats.owes_acks:
            return
        self._ack_at = now + self._settings.ack_interval_seconds
        for _ in range(self._settings.acks_per_flush_max):
            if not self._chats.owes_acks or not link.pace.allows(now):
                return
            chat_id, cursor = self._chats.next_ack()
            self._write(Ack(payload=AckBody(chat_id, cursor.epoch, cursor.sequence)))

    def _send_reads(self, link: Link, now: float) -> None:
        while self._reads and link.pace.allows(now):
            chat_id = next(iter(self._reads))
            sequence = self._reads.pop(chat_id)
            self._reads_said_here[chat_id] = max(sequence, self._reads_said_here.get(chat_id, 0))
            self._write(Read(payload=ReadBody(chat_id, sequence)))

    def _owe_reads_again(self) -> None:
        """A read has no answer, so those of this connection may have been lost: say them again."""
        for chat_id, sequence in self._reads_said_here.items():
            self._reads[chat_id] = max(sequence, self._reads.get(chat_id, 0))
        self._reads_said_here.clear()

    def _check_deadlines(self, link: Link, now: float) -> None:
        if now >= link.drop_at:
            self._actions.append(Drop("the server announced its closing and did not close"))
        elif now >= link.heard_at + link.silence_seconds:
            self._actions.append(Drop("the server is silent"))
        elif now >= self._answer_due(link):
            self._actions.append(Drop("the server does not answer"))

    def _answer_due(self, link: Link) -> float:
        asked_at = min(link.waits_since(), self.outbox.oldest_in_flight())
        return max(asked_at, link.coming_at) + self._settings.reply_timeout_seconds

    def _say_here(self, link: Link, now: float) -> None:
        link.said_at = now
        self._write(HeartbeatAck())

    def _expires(self, link: Link, expires_at: float | None, now: float) -> None:
        if expires_at is not None:
            margin = min(self._settings.refresh_before_expiry_seconds, (expires_at - now) / 2)
            link.renew_at = max(now + 1.0, expires_at - margin)

    def _write(self, frame: AnyClientFrame) -> None:
        self._actions.append(Write(frame))

    def _request(self) -> str:
        self._requests += 1
        return f"{self._requests}"
