"""A device on virtual time: the real client machine in a shell without sockets, recording what it does and sees.

What a device has on its disk (cursors, unsent messages, its copy of the chats) survives ``crash``; the rest does
not. The copy and the cursor move together, so a message that was taken twice would be in the copy twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, assert_never

from holdfast.client.actions import Action, Announced, Drop, Keep, Online, RenewToken, Settled, Write
from holdfast.client.events import ChatGone, ChatReset
from holdfast.client.machine import Machine
from holdfast.client.outbox import Entry, Outbox
from holdfast.client.reconnect import Reconnect, Stop
from holdfast.client.settings import ClientSettings
from holdfast.message import Cursor, Message, Page, User
from holdfast.verify.history import (
    Client,
    Closed,
    Dropped,
    Fail,
    Held,
    Moved,
    Ok,
    Opened,
    PageSeen,
    Pushed,
    Recorder,
    Sighting,
    Unknown,
    digest,
)
from holdfast.wire.codec import ServerFrame, encode_client_frame
from holdfast.wire.frames import (
    Ack,
    AnyClientFrame,
    Error,
    MessageAck,
    Resume,
    Resumed,
    SendMessage,
    SyncBody,
    SyncRequest,
)

if TYPE_CHECKING:
    from holdfast.verify.simulation.network import Wire

Dial = Callable[["Device"], "Wire | None"]
"""Opens a connection to the server, or None if there is none to be had now."""


class Device:
    """One client. ``name`` is unique in a history; a user may have several."""

    machine_type: type[Machine] = Machine

    def __init__(self, name: str, user: User, record: Recorder, rng: random.Random, settings: ClientSettings) -> None:
        self.name = name
        self.user = user
        self.device_id = f"device-{name}"
        self._record = record
        self._rng = rng
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.cursors: dict[str, Cursor] = {}
        self.unsent: dict[str, Entry] = {}
        self.copies: dict[str, list[tuple[int, str]]] = {}
        self._dial: Dial | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._redial: asyncio.TimerHandle | None = None
        self.wire: Wire | None = None
        self._connections = 0
        self._connection = ""
        self._refused = False
        self._asides = 0
        self._open_ops: dict[str, int] = {}
        self._asked: dict[str, AnyClientFrame] = {}
        self.stopped: Stop | None = None
        self.paused = False
        self._boot()
        record.note(Client(client=name, tenant=user.tenant, user_id=user.user_id, device_id=self.device_id))

    def _boot(self) -> None:
        backoff = self._settings.backoff
        outbox = Outbox(self.unsent.values(), self._settings.sends_in_flight_max, backoff, self._rng)
        self.machine = self.machine_type(self._settings, outbox, dict(self.cursors), self._rng)
        self._reconnect = Reconnect(backoff, self._rng, can_renew=True)

    # What the person does

    def switch_on(self, dial: Dial) -> None:
        self._dial = dial
        self._connect()

    def send(self, chat_id: str, key: str, content: str) -> None:
        entry = Entry(key, chat_id, content, "text/plain")
        self.unsent[key] = entry
        self._do(self.machine.send(entry, self._loop.time()))

    def ask_at_once(self, chat_id: str, pages: int) -> None:
        """Ask for several pages beside what the machine does, which asks for one at a time; it ignores the answers."""
        cursor = self.cursors.get(chat_id, Cursor(1, 0))
        for _ in range(pages):
            self._asides += 1
            body = SyncBody(chat_id, cursor.epoch, cursor.sequence, 100)
            self._write(SyncRequest(request_id=f"aside-{self._asides}", payload=body))

    def pause(self, paused: bool) -> None:
        """Stop or go on reading: a slow consumer."""
        self.paused = paused
        if self.wire is not None:
            self.wire.read_on(not paused)

    def crash(self) -> None:
        """Lose everything but the disk, and start again."""
        self._hang_up("network")
        for chat_id, copy in self.copies.items():
            kept = self.cursors.get(chat_id, Cursor(0, 0)).sequence
            copy[:] = [pair for pair in copy if pair[0] <= kept]
        self._boot()

    def switch_off(self) -> None:
        for timer in (self._timer, self._redial):
            if timer is not None:
                timer.cancel()

    def note_copies(self, chats: Iterable[str]) -> None:
        """Record what this device has of these chats in the end."""
        for chat_id in chats:
            copy = self.copies.get(chat_id, [])
            cursor = self.cursors.get(chat_id, Cursor(0, 0))
            self._record.note(
                Held(
                    at=self._loop.time(),
                    client=self.name,
                    chat_id=chat_id,
                    epoch=cursor.epoch,
                    cursor=cursor.sequence,
                    messages=list(copy),
                )
            )

    # The connection

    def _connect(self) -> None:
        self._redial = None
        assert self._dial is not None
        wire = self._dial(self)
        if wire is None:
            self._try_later(self._reconnect.unreachable("no server").delay_seconds)
            return
        self.wire = wire
        self._connections += 1
        self._connection = f"{self.name}/{self._connections}"
        self._refused = False
        self._record.note(Opened(at=self._loop.time(), client=self.name, connection=self._connection))
        wire.read_on(not self.paused)
        self._do(self.machine.opened(None, self._loop.time()))

    @property
    def connection(self) -> str:
        """The name of the present (or next) connection in the history."""
        return f"{self.name}/{self._connections + (self.wire is None)}"

    def ended(self, wire: Wire, code: int | None) -> None:
        if wire is self.wire:
            self._over("server" if wire.closed_by_server else "network", code)

    def _hang_up(self, by: Literal["client", "network"]) -> None:
        if self.wire is not None:
            self.wire.cut()
            self._over(by, None)

    def _over(self, by: Literal["server", "client", "network"], code: int | None) -> None:
        self.wire = None
        now = self._loop.time()
        self._record.note(Closed(at=now, client=self.name, connection=self._connection, by=by))
        gave_up = (
            by == "client" and not self._refused
        )  # a client that was refused its resume hangs up, waiting for nothing
        for op in self._open_ops.values():
            self._record.note(Unknown(at=now, op=op, reason="timeout" if gave_up else "disconnected"))
        self._open_ops.clear()
        self._asked.clear()
        self.machine.disconnected()
        verdict = self._reconnect.closed(code)
        if isinstance(verdict, Stop):
            self.stopped = verdict
        else:
            self._try_later(verdict.delay_seconds)

    def _try_later(self, seconds: float) -> None:
        self._redial = self._loop.call_later(seconds, self._connect)

    def arrived(self, wire: Wire, frame: ServerFrame) -> None:
        if wire is not self.wire:
            return
        self._note(frame)
        self._do(self.machine.receive(frame, self._loop.time()))
        self._consume()

    def _consume(self) -> None:
        """The application takes what there is and is done with it at once."""
        while (taken := self.machine.inbox.take()) is not None:
            event, copy = taken
            match event:
                case Message():
                    self.store(event)
                case ChatReset(chat_id=chat_id) | ChatGone(chat_id=chat_id):
                    self.copies.pop(chat_id, None)
                    self._record.note(Dropped(at=self._loop.time(), client=self.name, chat_id=chat_id))
                case _:
                    pass
            self._do(self.machine.moved_past(event, copy, self._loop.time()))

    def store(self, message: Message) -> None:
        self.copies.setdefault(message.chat_id, []).append((message.sequence, message.message_id))

    # Carrying out

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Write(frame=frame):
                    self._write(frame)
                case Settled(entry=entry):
                    self.unsent.pop(entry.client_message_id, None)
                case Keep(chat_id=chat_id, cursor=cursor):
                    self._keep(chat_id, cursor)
                case Online():
                    self._reconnect.established()
                    self._reconnect.lasted()
                case Announced(closing=closing):
                    self._reconnect.announced(closing)
                case Drop():
                    self._hang_up("client")
                case RenewToken():
                    pass
                case _:
                    assert_never(action)
        self._set_timer()

    def _keep(self, chat_id: str, cursor: Cursor | None) -> None:
        if cursor is None:
            self.cursors.pop(chat_id, None)
            self.copies.pop(chat_id, None)
        else:
            self.cursors[chat_id] = cursor
            self._do(self.machine.kept([(chat_id, cursor)], self._loop.time()))

    def _write(self, frame: AnyClientFrame) -> None:
        if self.wire is None:
            return
        self._note_asked(frame)
        self.wire.send(encode_client_frame(frame))

    def _set_timer(self) -> None:
        due = self.machine.wake_at()
        if self._timer is not None:
            if due == self._timer.when():
                return
            self._timer.cancel()
            self._timer = None
        if due is not None and due != float("inf"):
            self._timer = self._loop.call_at(max(due, self._loop.time()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._do(self.machine.tick(self._loop.time()))
        self._consume()

    # Recording

    def _note_asked(self, frame: AnyClientFrame) -> None:
        now, record = self._loop.time(), self._record
        op = None
        match frame:
            case SendMessage(payload=body):
                content = digest(body.content, body.content_type)
                op = record.invoke(now, self.name, "send", body.chat_id, key=body.client_message_id, digest=content)
            case SyncRequest(payload=sync):
                cursors = {sync.chat_id: Cursor(sync.epoch, sync.after_sequence)}
                op = record.invoke(now, self.name, "sync", sync.chat_id, cursors=cursors)
            case Resume(payload=resume):
                cursors = {chat_id: Cursor(*cursor) for chat_id, cursor in resume.cursors.items()}
                op = record.invoke(now, self.name, "resume", cursors=cursors)
            case Ack(payload=ack):
                record.note(
                    Moved(at=now, client=self.name, chat_id=ack.chat_id, epoch=ack.epoch, sequence=ack.sequence)
                )
            case _:
                pass
        if op is not None and frame.request_id is not None:
            self._open_ops[frame.request_id] = op
            self._asked[frame.request_id] = frame

    def _note(self, frame: ServerFrame) -> None:
        now, payload = self._loop.time(), frame.payload
        if isinstance(payload, Message):
            seen = Sighting.of(payload)
            self._record.note(
                Pushed(at=now, client=self.name, connection=self._connection, chat_id=payload.chat_id, message=seen)
            )
        op = self._open_ops.pop(frame.request_id, None) if frame.request_id is not None else None
        if op is None or frame.request_id is None:
            return
        asked = self._asked.pop(frame.request_id)
        match payload:
            case MessageAck():
                acked = Sighting(payload.sequence, payload.message_id)
                self._record.note(Ok(at=now, op=op, acked=acked, deduplicated=payload.deduplicated))
            case Page():
                self._record.note(Ok(at=now, op=op, pages=[PageSeen.of(payload, _asked_from(asked, payload.chat_id))]))
            case Resumed():
                pages = [
                    PageSeen.of(
                        Page(c.chat_id, c.epoch, c.messages, c.through, c.has_more, c.head, c.reset),
                        _asked_from(asked, c.chat_id),
                    )
                    for c in payload.chats
                ]
                self._record.note(Ok(at=now, op=op, pages=pages))
            case Error(outcome="unknown"):
                self._record.note(Unknown(at=now, op=op, reason="answered", code=payload.code))
            case Error():
                self._refused = self._refused or isinstance(asked, Resume)
                self._record.note(Fail(at=now, op=op, code=payload.code))
            case _:
                self._record.note(Ok(at=now, op=op))


def _asked_from(frame: AnyClientFrame, chat_id: str) -> Cursor | None:
    match frame:
        case SyncRequest(payload=sync):
            return Cursor(sync.epoch, sync.after_sequence)
        case Resume(payload=resume) if chat_id in resume.cursors:
            return Cursor(*resume.cursors[chat_id])
        case _:
            return None
