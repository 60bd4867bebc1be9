"""Clients that record a history of everything they send and receive.

``ClientRecorder`` turns one client's frames into events of a history.
``recording_machine`` makes a client machine that reports to one; the simulation runs it
without sockets.
``RecordingClient`` is the whole client with such a machine, on real sockets. So both
write the same history. Every attempt of a request is an operation of its own, from the
request to its reply, or to the end of the connection.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from holdfast.client import ChatGone, ChatReset, Client, ClientSettings
from holdfast.client.connection import TokenProvider
from holdfast.client.events import ClientEvent, Drop, MachineAction, Write
from holdfast.client.machine import Machine
from holdfast.client.reconnect import Reconnect, ReconnectVerdict
from holdfast.message import Cursor, Message, Page, User
from holdfast.resilience import Backoff
from holdfast.verify.history import (
    ClientSeen,
    Closed,
    ClosingSeen,
    CursorMoved,
    Dropped,
    EphemeralSeen,
    Fail,
    Held,
    Ok,
    Opened,
    PageSeen,
    Pushed,
    Recorder,
    Sighting,
    Unknown,
    WarningSeen,
    digest,
)
from holdfast.wire.codec import ServerFrame
from holdfast.wire.frames import (
    Ack,
    AnyClientFrame,
    ConnectionClosing,
    Error,
    MessageAck,
    Receipt,
    ReplyTextDelta,
    ReplyTextState,
    Resume,
    Resumed,
    SendMessage,
    SyncRequest,
    Typing,
)


class ClientRecorder:
    """Records the requests and frames of one client. ``now`` is the history's clock.

    ``alone``: the server side is not recorded, so the warnings and closings that this
    client receives are.
    """

    def __init__(
        self, record: Recorder, who: ClientSeen, now: Callable[[], float], *, alone: bool = False
    ) -> None:
        self._record = record
        self._name = who.client
        self._now = now
        self._alone = alone
        self._connected = False
        self._why = ""
        self._asked: dict[str, tuple[int, AnyClientFrame]] = {}
        record.note(who)

    @property
    def connection(self) -> str:
        """The name of the current connection, or of the next one."""
        return f"{self._name}/{self._record.connections[self._name] + (not self._connected)}"

    def on_opened(self) -> None:
        self._record.connections[self._name] += 1
        self._connected = True
        self._why = ""
        self._record.note(Opened(at=self._now(), client=self._name, connection=self.connection))

    def on_giving_up(self, why: str) -> None:
        """The client is about to drop the connection because a reply is missing."""
        self._why = why

    def on_ended(self, by: Literal["server", "client", "network"]) -> None:
        """The connection has ended; the outcome of its open requests is unknown."""
        if not self._connected:
            return
        now = self._now()
        by = "client" if self._why else by
        closed = Closed(at=now, client=self._name, connection=self.connection, by=by, why=self._why)
        self._connected = False
        self._record.note(closed)
        for op, _ in self._asked.values():
            self._record.note(
                Unknown(at=now, op=op, reason="timeout" if self._why else "disconnected")
            )
        self._asked.clear()

    def on_dropped(self, chat_id: str) -> None:
        self._record.note(Dropped(at=self._now(), client=self._name, chat_id=chat_id))

    def note_copy(self, chat_id: str, cursor: Cursor, messages: Sequence[tuple[int, str]]) -> None:
        """Record the client's copy of a chat, at the end, after time to catch up."""
        held = Held(
            at=self._now(),
            client=self._name,
            chat_id=chat_id,
            epoch=cursor.epoch,
            cursor=cursor.sequence,
            messages=list(messages),
        )
        self._record.note(held)

    def on_request(self, frame: AnyClientFrame) -> None:
        """The client sends a frame."""
        now, record, op = self._now(), self._record, None
        match frame:
            case SendMessage(payload=body):
                content = digest(body.content, body.content_type)
                op = record.invoke(
                    now,
                    self._name,
                    "send",
                    body.chat_id,
                    key=body.client_message_id,
                    digest=content,
                )
            case SyncRequest(payload=sync):
                cursors = {sync.chat_id: Cursor(sync.epoch, sync.after_sequence)}
                op = record.invoke(now, self._name, "sync", sync.chat_id, cursors=cursors)
            case Resume(payload=resume):
                cursors = {chat_id: Cursor(*claim[:2]) for chat_id, claim in resume.cursors.items()}
                op = record.invoke(now, self._name, "resume", cursors=cursors)
            case Ack(payload=ack):
                moved = CursorMoved(
                    at=now,
                    client=self._name,
                    chat_id=ack.chat_id,
                    epoch=ack.epoch,
                    sequence=ack.sequence,
                )
                record.note(moved)
            case _:
                pass
        if op is not None and frame.request_id is not None:
            self._asked[frame.request_id] = (op, frame)

    def on_frame(self, frame: ServerFrame) -> None:
        """The client received a frame."""
        now, payload = self._now(), frame.payload
        if isinstance(payload, Message):
            seen, connection = Sighting.of(payload), self.connection
            push = Pushed(
                at=now,
                client=self._name,
                connection=connection,
                chat_id=payload.chat_id,
                message=seen,
            )
            self._record.note(push)
        elif isinstance(payload, Typing | Receipt | ReplyTextDelta | ReplyTextState):
            ephemeral = EphemeralSeen(
                at=now, client=self._name, chat_id=payload.chat_id, kind=payload.type
            )
            self._record.note(ephemeral)
        elif self._alone:
            self._note_warning(payload, now)
        op, asked = self._asked.pop(frame.request_id or "", (0, None))
        if asked is not None:
            self._record.note(_answer(op, asked, payload, now))

    def _note_warning(self, payload: object, now: float) -> None:
        match payload:
            case ConnectionClosing(reason=reason):
                self._record.note(ClosingSeen(at=now, connection=self.connection, reason=reason))
            case Error(code="SLOW_CONSUMER", grace_period_seconds=grace):
                self._record.note(
                    WarningSeen(at=now, connection=self.connection, grace_seconds=grace or 0.0)
                )
            case _:
                pass


def _answer(op: int, asked: AnyClientFrame, payload: object, now: float) -> Ok | Fail | Unknown:
    match payload:
        case MessageAck():
            acked = Sighting(payload.sequence, payload.message_id)
            return Ok(at=now, op=op, acked=acked, deduplicated=payload.deduplicated)
        case Page():
            return Ok(
                at=now, op=op, pages=[PageSeen.of(payload, _asked_from(asked, payload.chat_id))]
            )
        case Resumed(chats=chats):
            pages = (
                Page(c.chat_id, c.epoch, c.messages, c.through, c.has_more, c.head, c.reset)
                for c in chats
            )
            return Ok(
                at=now,
                op=op,
                pages=[PageSeen.of(page, _asked_from(asked, page.chat_id)) for page in pages],
            )
        case Error(outcome="unknown"):
            return Unknown(at=now, op=op, reason="answered", code=payload.code)
        case Error():
            return Fail(at=now, op=op, code=payload.code)
        case _:
            return Ok(at=now, op=op)


def _asked_from(frame: AnyClientFrame, chat_id: str) -> Cursor | None:
    match frame:
        case SyncRequest(payload=sync):
            return Cursor(sync.epoch, sync.after_sequence)
        case Resume(payload=resume) if chat_id in resume.cursors:
            return Cursor(*resume.cursors[chat_id][:2])
        case _:
            return None


def recording_machine(recorder: ClientRecorder) -> type[Machine]:
    """The client's machine, recorded by ``recorder``.

    The shell records how a connection ended: no machine knows that.
    """

    class RecordingMachine(Machine):
        def on_opened(self, expires_at: float | None, now: float) -> list[MachineAction]:
            recorder.on_opened()
            return super().on_opened(expires_at, now)

        def receive(self, frame: ServerFrame, now: float) -> list[MachineAction]:
            recorder.on_frame(frame)
            return super().receive(frame, now)

        def _done(self, now: float) -> list[MachineAction]:
            actions = super()._done(now)
            for action in actions:
                if isinstance(action, Write):
                    recorder.on_request(action.frame)
                elif isinstance(action, Drop):
                    recorder.on_giving_up(action.reason)
            return actions

    return RecordingMachine


class RecordingClient(Client):
    """The client with a recorded machine. ``copies`` has its messages of every chat.

    Times are monotonic. The caller passes every event that it gets to ``take``.
    """

    def __init__(
        self,
        url: str,
        token: str | TokenProvider,
        record: Recorder,
        user: User,
        device_id: str,
        *,
        name: str | None = None,
        state: Path | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        """``name``: the client's name in the history; default: its device id."""
        who = ClientSeen(
            client=name or device_id, tenant=user.tenant, user_id=user.user_id, device_id=device_id
        )
        self.recorder = ClientRecorder(record, who, time.monotonic, alone=True)
        super().__init__(
            url,
            token,
            device_id=device_id,
            state=state,
            settings=settings,
            machine_type=recording_machine(self.recorder),
        )
        self._reconnect = _RecordingReconnect(
            self.recorder, self._settings.backoff, self._rng, self._provider is not None
        )
        self.copies: dict[str, list[tuple[int, str]]] = {}
        self._epochs: dict[str, int] = {}

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self.recorder.on_ended("client")

    def cut(self) -> None:
        """Break the connection without a closing handshake, as a network would."""
        self._cut()

    def take(self, event: ClientEvent) -> None:
        """Add a message to its chat's copy, or drop the copy."""
        match event:
            case Message():
                self.copies.setdefault(event.chat_id, []).append((event.sequence, event.message_id))
            case ChatReset(chat_id=chat_id, epoch=epoch):
                self._epochs[chat_id] = epoch
                self._drop(chat_id)
            case ChatGone(chat_id=chat_id):
                self._drop(chat_id)
            case _:
                pass

    def note_copy(self, chat_id: str) -> None:
        """Record the copy of a chat, after the client had time to catch up."""
        copy = self.copies.get(chat_id, [])
        self.recorder.note_copy(
            chat_id, Cursor(self._epochs.get(chat_id, 1), copy[-1][0] if copy else 0), copy
        )

    def _drop(self, chat_id: str) -> None:
        self.copies.pop(chat_id, None)
        self.recorder.on_dropped(chat_id)


class _RecordingReconnect(Reconnect):
    """Records how connections end: by the server if there was a close frame."""

    def __init__(
        self, recorder: ClientRecorder, backoff: Backoff, rng: random.Random, can_renew: bool
    ) -> None:
        super().__init__(backoff, rng, can_renew)
        self._recorder = recorder

    def on_closed(self, code: int | None) -> ReconnectVerdict:
        self._recorder.on_ended("network" if code is None else "server")
        return super().on_closed(code)
