"""The client's machine against a model server, over every interleaving.

The network loses the tail of both directions when a connection breaks; the server
skips, repeats and renumbers; the user leaves chats and joins them again; the disk lags;
the application lags and crashes. Always: what the application has of a chat is a prefix
of what the server has, in order, once, and no ack says more than the disk. In the end,
healed: it is everything, and every send that was not refused is stored once, in the
order of the calls.
"""

from __future__ import annotations

import random
from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.client import ChatGone, ChatReset, ClientSettings
from holdfast.client.events import Drop, Keep, MachineAction, Settled, Write
from holdfast.client.machine import Machine
from holdfast.client.outbox import Outbox, OutboxEntry
from holdfast.errors import NotAMember
from holdfast.message import Message, Page
from holdfast.wire.codec import (
    ServerFrame,
    decode_client_frame,
    decode_server_frame,
    encode_client_frame,
    encode_payload,
)
from holdfast.wire.frames import (
    Ack,
    AnyClientFrame,
    ChatHead,
    ConnectionEstablished,
    CursorClaim,
    Error,
    Heartbeat,
    MessageAck,
    Resume,
    Resumed,
    ResumedChat,
    Resync,
    Sendable,
    SendMessage,
    SyncRequest,
)

CHATS = ("c", "d")
chats = st.sampled_from(CHATS)
SETTINGS = ClientSettings(
    buffer_messages_max=5, page_messages=3, resume_chats_per_frame=1, sends_in_flight_max=2
)


class ModelServer:
    """What a server must do, in the fewest lines."""

    def __init__(self) -> None:
        self.epochs = dict.fromkeys(CHATS, 1)
        self.stored: dict[str, list[Message]] = {chat_id: [] for chat_id in CHATS}
        self.members = set(CHATS)
        self.keys: dict[tuple[str, str], Message] = {}
        self.refuse_next = 0
        self.refuse_resumes: list[Error] = []
        self.cursors: dict[str, CursorClaim] = {}

    def append(self, chat_id: str, sender: str, key: str) -> Message:
        sequence = len(self.stored[chat_id]) + 1
        message = Message(
            f"m-{key}", chat_id, sequence, "text", sender, key, f"text {key}", "text/plain", ""
        )
        self.stored[chat_id].append(message)
        self.keys[chat_id, key] = message
        return message

    def page(self, chat_id: str, epoch: int, after: int, limit: int) -> Page:
        stored, reset = self.stored[chat_id], epoch != self.epochs[chat_id]
        start = 0 if reset else after
        messages = stored[start : start + limit]
        through = start + len(messages)
        return Page(
            chat_id,
            self.epochs[chat_id],
            messages,
            through,
            through < len(stored),
            len(stored),
            reset,
        )

    def resumed(self, cursors: dict[str, CursorClaim]) -> Resumed:
        ours = {chat_id: cursor for chat_id, cursor in cursors.items() if chat_id in self.members}
        pages = [self.page(chat_id, *cursor[:2], 2) for chat_id, cursor in ours.items()]
        chats = [
            ResumedChat(p.chat_id, p.epoch, p.head, p.messages, p.through, p.has_more, p.reset)
            for p in pages
            if p.messages or p.reset
        ]
        joined = [
            chat_id for chat_id in CHATS if chat_id in self.members and chat_id not in cursors
        ]
        return Resumed(
            chats, joined, [chat_id for chat_id in cursors if chat_id not in self.members]
        )

    def answer(self, frame: AnyClientFrame) -> Sendable | None:
        match frame:
            case Resume(payload=body):
                self.cursors.update(body.cursors)
                if body.more:
                    return None
                cursors, self.cursors = self.cursors, {}
                return self.refuse_resumes.pop() if self.refuse_resumes else self.resumed(cursors)
            case SyncRequest(payload=body):
                if body.chat_id not in self.members:
                    return not_a_member(body.chat_id)
                return self.page(body.chat_id, body.epoch, body.after_sequence, body.limit or 100)
            case SendMessage(payload=body):
                if self.refuse_next:
                    self.refuse_next -= 1
                    return Error("SERVER_BUSY", "", True, "rejected", 0.5)
                known = self.keys.get((body.chat_id, body.client_message_id))
                if known is None and body.chat_id not in self.members:
                    return not_a_member(body.chat_id)
                message = known or self.append(body.chat_id, "alice", body.client_message_id)
                return MessageAck(
                    body.client_message_id,
                    message.message_id,
                    body.chat_id,
                    message.sequence,
                    "",
                    known is not None,
                )
            case Ack(payload=body):
                if body.chat_id not in self.members:
                    return not_a_member(body.chat_id)
                if body.epoch == self.epochs[body.chat_id]:
                    assert body.sequence <= len(self.stored[body.chat_id])
                return None
            case _:
                return None


def not_a_member(chat_id: str) -> Error:
    return Error("NOT_A_MEMBER", "", False, details={"chat_id": chat_id})


class ClientAgainstServer(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.server = ModelServer()
        self.now = 0.0
        self.number = 0
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.connected = False
        self.disk_cursors: dict[str, CursorClaim] = {}
        self.disk_waits: deque[Keep] = deque()
        self.disk_outbox: dict[str, OutboxEntry] = {}
        self.sent_order: dict[str, list[str]] = {chat_id: [] for chat_id in CHATS}
        self.shown: dict[str, list[Message]] = {chat_id: [] for chat_id in CHATS}
        self.start()

    def start(self) -> None:
        outbox = Outbox(self.disk_outbox.values(), 2, SETTINGS.backoff, random.Random(7))
        self.machine = Machine(SETTINGS, outbox, dict(self.disk_cursors), random.Random(1))
        self.machine.listen(self.now)

    def do(self, actions: list[MachineAction]) -> None:
        for action in actions:
            match action:
                case Write(frame):
                    if isinstance(frame, Ack):
                        self.is_on_disk(
                            frame.payload.chat_id,
                            CursorClaim(frame.payload.epoch, frame.payload.sequence),
                        )
                    self.up.append(encode_client_frame(frame))
                case Keep() as keep:
                    self.disk_waits.append(keep)
                case Settled(entry, outcome):
                    del self.disk_outbox[entry.client_message_id]
                    if isinstance(outcome, NotAMember):
                        self.sent_order[entry.chat_id].remove(entry.client_message_id)
                case Drop():
                    self.break_connection()
                    return

    def is_on_disk(self, chat_id: str, cursor: CursorClaim) -> None:
        kept = self.disk_cursors.get(chat_id)
        assert kept is not None and kept.epoch == cursor.epoch and kept.sequence >= cursor.sequence

    def push(self, payload: Sendable, request_id: str | None = None) -> None:
        self.down.append(encode_payload(payload, request_id))

    def break_connection(self) -> None:
        self.connected = False
        self.up.clear()
        self.down.clear()
        self.machine.on_disconnected()

    # What may happen

    @rule(count=st.integers(1, 9))
    def disk_catches_up(self, count: int) -> None:
        for _ in range(min(count, len(self.disk_waits))):
            keep = self.disk_waits.popleft()
            if keep.cursor is None:
                self.disk_cursors.pop(keep.chat_id, None)
            else:
                self.disk_cursors[keep.chat_id] = keep.cursor
                self.do(self.machine.on_kept([keep], self.now))

    @rule(chat_id=chats, unread=st.integers(0, 3), read=st.integers(0, 6))
    def user_leaves_and_is_back_before_the_application_has_read_everything(
        self, chat_id: str, unread: int, read: int
    ) -> None:
        self.server.members.add(chat_id)
        self.network_flows(2)
        self.application_reads(100)
        for _ in range(unread):
            self.somebody_writes(chat_id, "once")
        self.network_flows(1)
        for _ in range(2):
            self.user_leaves_or_joins_again(chat_id, is_notified=True)
            self.network_flows(2)
        self.application_reads(unread)
        self.disk_catches_up(100)
        self.application_reads(read)

    @rule(chat_id=chats, is_notified=st.booleans())
    def user_leaves_or_joins_again(self, chat_id: str, is_notified: bool) -> None:
        self.server.members ^= {chat_id}
        if self.connected and is_notified:
            self.push(Resync([ChatHead(chat_id, len(self.server.stored[chat_id]))]))

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected = True
        self.server.cursors = {}
        self.do(self.machine.on_opened(None, self.now))
        self.push(ConnectionEstablished("conn", "alice", "dev", "", 30_000, 1, {}))

    @precondition(lambda self: self.connected)
    @rule()
    def connection_breaks(self) -> None:
        self.break_connection()

    @rule(count=st.integers(1, 4))
    def server_reads(self, count: int) -> None:
        for _ in range(min(count, len(self.up))):
            frame = decode_client_frame(self.up.popleft())
            before = len(self.server.stored["c"]) + len(self.server.stored["d"])
            answer = self.server.answer(frame)
            if answer is not None:
                self.push(answer, frame.request_id)
            if (
                isinstance(frame, SendMessage)
                and len(self.server.stored["c"]) + len(self.server.stored["d"]) > before
            ):
                self.push(self.server.stored[frame.payload.chat_id][-1])

    @rule(count=st.integers(1, 6))
    def client_reads(self, count: int) -> None:
        for _ in range(min(count, len(self.down))):
            frame = decode_server_frame(self.down.popleft())
            assert isinstance(frame, ServerFrame)
            self.do(self.machine.receive(frame, self.now))

    @rule(rounds=st.integers(1, 3))
    def network_flows(self, rounds: int) -> None:
        if not self.connected:
            self.connect()
        for _ in range(rounds):
            self.server_reads(100)
            self.client_reads(100)

    @rule(chat_id=chats, how=st.sampled_from(["once", "twice", "skipped"]))
    def somebody_writes(self, chat_id: str, how: str) -> None:
        self.number += 1
        message = self.server.append(chat_id, "bob", f"b{self.number}")
        if self.connected and chat_id in self.server.members:
            for _ in range({"once": 1, "twice": 2, "skipped": 0}[how]):
                self.push(message)

    @rule(chat_id=chats)
    def client_sends(self, chat_id: str) -> None:
        self.number += 1
        entry = OutboxEntry(f"a{self.number}", chat_id, f"text a{self.number}", "text/plain")
        self.disk_outbox[entry.client_message_id] = entry
        self.sent_order[chat_id].append(entry.client_message_id)
        self.do(self.machine.send(entry, self.now))

    @rule()
    def server_is_busy(self) -> None:
        self.server.refuse_next += 1

    @rule(retryable=st.booleans(), later=st.none() | st.floats(0.1, 5))
    def server_refuses_the_next_resume(self, retryable: bool, later: float | None) -> None:
        code = "SERVICE_UNAVAILABLE" if retryable else "INTERNAL_ERROR"
        self.server.refuse_resumes = [Error(code, "", retryable, retry_after_seconds=later)]

    @rule(chat_id=chats, count=st.integers(3, 8))
    def somebody_writes_much(self, chat_id: str, count: int) -> None:
        for _ in range(count):
            self.somebody_writes(chat_id, "once")
        self.network_flows(2)

    @rule(count=st.integers(1, 5))
    def application_reads(self, count: int) -> None:
        for _ in range(count):
            taken = self.machine.inbox.take()
            if taken is None:
                return
            match taken[0]:
                case Message() as message:
                    self.shown[message.chat_id].append(message)
                case ChatReset(chat_id=chat_id) | ChatGone(chat_id=chat_id):
                    self.shown[chat_id].clear()
            self.do(self.machine.on_consumed(*taken, self.now))

    @rule()
    def application_crashes(self) -> None:
        self.break_connection()
        self.disk_catches_up(len(self.disk_waits))
        self.start()

    @rule(chat_id=chats, keep=st.integers(0, 3))
    def operator_restores_a_backup(self, chat_id: str, keep: int) -> None:
        del self.server.stored[chat_id][keep:]
        self.server.epochs[chat_id] += 1
        stored = set(self.server.stored[chat_id])
        self.server.keys = {
            k: m for k, m in self.server.keys.items() if k[0] != chat_id or m in stored
        }
        lost = [key for key in self.sent_order[chat_id] if (chat_id, key) not in self.server.keys]
        self.sent_order[chat_id] = [
            key for key in self.sent_order[chat_id] if key not in lost or key in self.disk_outbox
        ]
        # the connection of an operator's restore ends, as a restarted server's does
        if self.connected:
            self.break_connection()

    @rule(seconds=st.floats(0.1, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.machine.tick(self.now))

    @precondition(lambda self: self.connected)
    @rule(resync=st.booleans())
    def server_tells_heads(self, resync: bool) -> None:
        heads = {c: len(self.server.stored[c]) for c in CHATS if c in self.server.members}
        if resync:
            self.push(Resync([ChatHead(chat_id, head) for chat_id, head in heads.items()]))
        else:
            self.push(
                Heartbeat(
                    {
                        chat_id: (self.server.epochs[chat_id], head)
                        for chat_id, head in heads.items()
                    }
                )
            )

    # What must hold

    @invariant()
    def what_is_shown_is_in_order_and_once(self) -> None:
        for shown in self.shown.values():
            assert [message.sequence for message in shown] == list(range(1, len(shown) + 1))

    @invariant()
    def the_disk_knows_what_was_shown(self) -> None:
        kept = dict(self.disk_cursors)
        for keep in self.disk_waits:
            kept[keep.chat_id] = keep.cursor or CursorClaim(0, 0)
        for chat_id, shown in self.shown.items():
            assert kept.get(chat_id, CursorClaim(0, 0)).sequence == len(shown)

    @invariant()
    def the_buffer_is_bounded(self) -> None:
        assert self.machine.inbox.room >= 0

    def teardown(self) -> None:
        """Heal everything: the client ends with exactly what the server has."""
        self.server.refuse_next = 0
        self.server.refuse_resumes = []
        self.server.members = set(CHATS)
        for _ in range(40):
            if not self.connected:
                self.connect()
            for _ in range(10):
                self.server_reads(100)
                self.client_reads(100)
                self.application_reads(100)
                self.disk_catches_up(100)
            self.server_tells_heads(False)
            self.time_passes(1)
        assert self.shown == self.server.stored
        assert not self.disk_outbox
        for chat_id in CHATS:
            mine = [
                m.client_message_id for m in self.server.stored[chat_id] if m.sender_id == "alice"
            ]
            assert mine == self.sent_order[chat_id]


TestClientAgainstServer = ClientAgainstServer.TestCase
TestClientAgainstServer.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
