"""A device on virtual time: the real client machine without sockets, recorded.

The device's disk (cursors, unsent messages, its copies of the chats) survives
``crash``; the rest does not. Copy and cursor move together, so a message that was taken
twice would be in the copy twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, assert_never

from holdfast import telemetry
from holdfast.client.events import (
    Announced,
    ChatGone,
    ChatReset,
    Drop,
    Keep,
    MachineAction,
    Online,
    RenewToken,
    Settled,
    Synced,
    Write,
)
from holdfast.client.outbox import Outbox, OutboxEntry
from holdfast.client.reconnect import Reconnect, Stop
from holdfast.client.settings import ClientSettings
from holdfast.message import Cursor, Message, User
from holdfast.verify.history import ClientSeen, Recorder
from holdfast.verify.recording import ClientRecorder, recording_machine
from holdfast.wire.codec import ServerFrame, encode_client_frame
from holdfast.wire.frames import AnyClientFrame, CursorClaim, SyncBody, SyncRequest

if TYPE_CHECKING:
    from proof.simulation.network import Wire

Dial = Callable[["Device"], "Wire | None"]
"""Opens a connection to the server; None if it is unavailable."""


class Device:
    """One client. ``name`` is unique in a history; a user may have several."""

    def __init__(
        self, name: str, user: User, record: Recorder, rng: random.Random, settings: ClientSettings
    ) -> None:
        self.name = name
        self.user = user
        self.device_id = f"device-{name}"
        self._rng = rng
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.cursors: dict[str, CursorClaim] = {}
        self.unsent: dict[str, OutboxEntry] = {}
        self.copies: dict[str, list[tuple[int, str]]] = {}
        self._dial: Dial | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._redial: asyncio.TimerHandle | None = None
        self.wire: Wire | None = None
        self._asides = 0
        self._online = False
        self.stopped: Stop | None = None
        self.paused = False
        who = ClientSeen(
            client=name, tenant=user.tenant, user_id=user.user_id, device_id=self.device_id
        )
        self.recorder = ClientRecorder(record, who, self._loop.time)
        self._machine_type = recording_machine(self.recorder)
        self._boot()

    def _boot(self) -> None:
        backoff = self._settings.backoff
        outbox = Outbox(
            self.unsent.values(), self._settings.sends_in_flight_max, backoff, self._rng
        )
        self.machine = self._machine_type(self._settings, outbox, dict(self.cursors), self._rng)
        self.machine.listen(self._loop.time())
        self._reconnect = Reconnect(backoff, self._rng, can_renew=True)

    # The user

    def switch_on(self, dial: Dial) -> None:
        self._dial = dial
        self._connect()

    def send(self, chat_id: str, key: str, content: str) -> None:
        entry = OutboxEntry(key, chat_id, content, "text/plain")
        self.unsent[key] = entry
        self._do(self.machine.send(entry, self._loop.time()))

    def ask_at_once(self, chat_id: str, pages: int) -> None:
        """Request several pages at once, beside the machine, which ignores the replies.

        Only while the server accepts the connection: before that it reads no request.
        """
        cursor = self.cursors.get(chat_id, CursorClaim(1, 0))
        for _ in range(pages if self._online else 0):
            self._asides += 1
            body = SyncBody(chat_id, cursor.epoch, cursor.sequence, 100, cursor.proof)
            frame = SyncRequest(request_id=f"aside-{self._asides}", payload=body)
            self.recorder.on_request(frame)
            self._write(frame)

    def pause(self, paused: bool) -> None:
        """Stop or resume reading: a slow consumer."""
        self.paused = paused
        if self.wire is not None:
            self.wire.read_on(not paused)

    def crash(self) -> None:
        """Lose everything but the disk, and start again."""
        self._hang_up("network")
        for chat_id, copy in self.copies.items():
            kept = self.cursors.get(chat_id, CursorClaim(0, 0)).sequence
            copy[:] = [pair for pair in copy if pair[0] <= kept]
        self._boot()

    def switch_off(self) -> None:
        for timer in (self._timer, self._redial):
            if timer is not None:
                timer.cancel()

    def note_copies(self, chats: Iterable[str]) -> None:
        """Record this device's final copies of these chats."""
        for chat_id in chats:
            cursor = self.cursors.get(chat_id, CursorClaim(0, 0))
            self.recorder.note_copy(
                chat_id, Cursor(cursor.epoch, cursor.sequence), self.copies.get(chat_id, [])
            )

    # The connection

    def _connect(self) -> None:
        self._redial = None
        assert self._dial is not None
        wire = self._dial(self)
        if wire is None:
            self._try_later(self._reconnect.on_unreachable("no server").delay_seconds)
            return
        self.wire = wire
        wire.read_on(not self.paused)
        self._do(self.machine.on_opened(None, self._loop.time()))

    def ended(self, wire: Wire, code: int | None) -> None:
        if wire is self.wire:
            self._over("server" if wire.closed_by_server else "network", code)

    def _hang_up(self, by: Literal["client", "network"]) -> None:
        if self.wire is not None:
            if by == "client":
                self.wire.hang_up()
            else:
                self.wire.cut()
            self._over(by, None)

    def _over(self, by: Literal["server", "client", "network"], code: int | None) -> None:
        self.wire = None
        self._online = False
        self.recorder.on_ended(by)
        self.machine.on_disconnected()
        verdict = self._reconnect.on_closed(code)
        if isinstance(verdict, Stop):
            self.stopped = verdict
        else:
            self._try_later(verdict.delay_seconds)

    def _try_later(self, seconds: float) -> None:
        self._redial = self._loop.call_later(seconds, self._connect)

    def arrived(self, wire: Wire, frame: ServerFrame) -> None:
        if wire is not self.wire:
            return
        self._do(self.machine.receive(frame, self._loop.time()))
        self._consume()

    def _consume(self) -> None:
        """The application takes all waiting events and confirms them at once."""
        while (taken := self.machine.inbox.take()) is not None:
            event, copy = taken
            match event:
                case Message():
                    self.store(event)
                case ChatReset(chat_id=chat_id) | ChatGone(chat_id=chat_id):
                    if isinstance(event, ChatReset):
                        telemetry.mark("a device dropped its copy for a newer epoch")
                    self.copies.pop(chat_id, None)
                    self.recorder.on_dropped(chat_id)
                case _:
                    pass
            self._do(self.machine.on_consumed(event, copy, self._loop.time()))

    def store(self, message: Message) -> None:
        self.copies.setdefault(message.chat_id, []).append((message.sequence, message.message_id))

    # Carrying out

    def _do(self, actions: list[MachineAction]) -> None:
        for action in actions:
            match action:
                case Write(frame=frame):
                    self._write(frame)
                case Settled(entry=entry):
                    self.unsent.pop(entry.client_message_id, None)
                case Keep() as keep:
                    self._keep(keep)
                case Online():
                    self._online = True
                    self._reconnect.on_established()
                    self._reconnect.on_lasted()
                case Announced(closing=closing):
                    self._reconnect.on_announced(closing)
                case Drop():
                    self._hang_up("client")
                case RenewToken() | Synced():
                    pass
                case _:
                    assert_never(action)
        self._set_timer()

    def _keep(self, keep: Keep) -> None:
        if keep.cursor is None:
            self.cursors.pop(keep.chat_id, None)
            self.copies.pop(keep.chat_id, None)
        else:
            self.cursors[keep.chat_id] = keep.cursor
            self._do(self.machine.on_kept([keep], self._loop.time()))

    def _write(self, frame: AnyClientFrame) -> None:
        if self.wire is not None:
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
