"""Whatever happens in whatever order: a client that follows the protocol ends with
every message, in order, once.

The machine plays the store, the fanout that skips and repeats, the connection that
takes when it likes, the time, and a client that knows the protocol and nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from session_driver import AS_ANN, AT, decoded

from holdfast.client.replies import GrowingTexts
from holdfast.errors import HoldfastError, NotAMember, Unavailable
from holdfast.message import Cursor, Message, MessageKind, Page, ResumeRead
from holdfast.session.effects import (
    Close,
    Delivered,
    Effects,
    Fetch,
    FetchResume,
    PauseReading,
    ResumeReading,
)
from holdfast.session.growing_reply import GrowingReply
from holdfast.session.session import Session
from holdfast.session.settings import (
    BackpressureSettings,
    InboundSettings,
    OutboundSettings,
    PageSettings,
    SessionSettings,
)
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.codec import EncodedRun, ServerFrame
from holdfast.wire.frames import (
    Ack,
    AckBody,
    AnyClientFrame,
    ConnectionClosing,
    ConnectionEstablished,
    CursorClaim,
    Error,
    Heartbeat,
    HeartbeatAck,
    ReplyTextDelta,
    ReplyTextState,
    Resume,
    ResumeBody,
    Resumed,
    ResumedChat,
    Resync,
    SyncBody,
    SyncRequest,
)

LIMITS = SessionSettings(
    backpressure=BackpressureSettings(
        inbound=InboundSettings(max_queue_depth=6),
        outbound=OutboundSettings(max_buffer_messages=20, max_control_frames=8),
    ),
    pages=PageSettings(default_messages=3, max_messages=3, resume_chats_per_frame=2),
)
CHATS = ["chat_a", "chat_b", "chat_c"]


class Store:
    """Chats as they are: an epoch and messages 1..head; members come and go."""

    def __init__(self) -> None:
        self.epoch = dict.fromkeys(CHATS, 1)
        self.head = dict.fromkeys(CHATS, 0)
        self.members = {"chat_a", "chat_b"}
        self.events: set[tuple[str, int]] = set()

    def message(self, chat_id: str, sequence: int) -> Message:
        kind: MessageKind = "event" if (chat_id, sequence) in self.events else "text"
        return Message(
            f"msg_{chat_id}_{sequence}", chat_id, sequence, kind, "bob", None, "x", "text/plain", AT
        )

    def leave(self, chat_id: str) -> EncodedRun:
        """The user leaves: the chat's next message is the event that says so."""
        self.head[chat_id] += 1
        self.events.add((chat_id, self.head[chat_id]))
        self.members.discard(chat_id)
        return self.run(chat_id, self.head[chat_id], self.head[chat_id])

    def run(self, chat_id: str, first: int, last: int) -> EncodedRun:
        messages = [self.message(chat_id, sequence) for sequence in range(first, last + 1)]
        return EncodedRun(messages, self.epoch[chat_id])

    def cursor(self, chat_id: str) -> Cursor:
        return Cursor(self.epoch[chat_id], self.head[chat_id])

    def page(self, chat_id: str, cursor: Cursor, limit: int) -> Page:
        reset = cursor.epoch != self.epoch[chat_id]
        after = 0 if reset else cursor.sequence
        head = self.head[chat_id]
        through = min(head, after + limit)
        messages = [self.message(chat_id, sequence) for sequence in range(after + 1, through + 1)]
        return Page(chat_id, self.epoch[chat_id], messages, through, through < head, head, reset)

    def read(self, effect: Fetch | FetchResume) -> Page | ResumeRead | HoldfastError:
        if isinstance(effect, Fetch):
            if effect.chat_id not in self.members:
                return NotAMember("no")
            return self.page(effect.chat_id, effect.cursor, effect.limit)
        heads = {chat_id: self.cursor(chat_id) for chat_id in sorted(self.members)}
        moved = [c for c in heads if c in effect.cursors and effect.cursors[c] != heads[c]]
        pages = [self.page(chat_id, effect.cursors[chat_id], 3) for chat_id in moved[:1]]
        return ResumeRead(
            pages=pages,
            joined=[chat_id for chat_id in heads if chat_id not in effect.cursors],
            gone=[chat_id for chat_id in effect.cursors if chat_id not in heads],
            heads={chat_id: head for chat_id, head in heads.items() if chat_id not in moved[:1]},
        )


@dataclass
class Copy:
    """What the client has of a chat."""

    epoch: int = 0
    messages: list[str] = field(default_factory=list)
    wanted: bool = True
    asked: str | None = None

    @property
    def cursor(self) -> int:
        return len(self.messages)


class Client:
    """Takes the next message, pulls what it lacks, answers heartbeats."""

    def __init__(self) -> None:
        self.copies: dict[str, Copy] = {}
        self.inbox: list[ServerFrame] = []
        self.requests = 0
        self.resuming: str | None = None
        self.resume_failed = False
        self.texts = GrowingTexts()

    def reconnected(self) -> list[AnyClientFrame]:
        self.inbox.clear()
        self.texts.clear()
        return self.resume()

    def resume(self) -> list[AnyClientFrame]:
        self.resume_failed = False
        for copy in self.copies.values():
            copy.asked, copy.wanted = None, False
        chats = list(self.copies.items())
        frames: list[AnyClientFrame] = []
        for at in range(0, len(chats), 2) or [0]:
            self.resuming = self._request_id()
            cursors = {
                chat_id: CursorClaim(copy.epoch, copy.cursor)
                for chat_id, copy in chats[at : at + 2]
            }
            body = ResumeBody(cursors, more=at + 2 < len(chats))
            frames.append(Resume(request_id=self.resuming, payload=body))
        return frames

    def _request_id(self) -> str:
        self.requests += 1
        return f"r{self.requests}"

    def pulls(self) -> list[AnyClientFrame]:
        """A pull for each chat that wants one; a failed resume comes first."""
        if self.resume_failed:
            return self.resume()
        frames: list[AnyClientFrame] = []
        for chat_id, copy in self.copies.items():
            if copy.wanted and copy.asked is None and self.resuming is None:
                copy.asked, copy.wanted = self._request_id(), False
                frames.append(
                    SyncRequest(
                        request_id=copy.asked, payload=SyncBody(chat_id, copy.epoch, copy.cursor)
                    )
                )
        return frames

    def process(self) -> list[AnyClientFrame]:
        frame = self.inbox.pop(0)
        match frame.payload:
            case Message() as message:
                return self._pushed(message)
            case Page() as page:
                self._settle(page, frame.request_id)
            case Resumed() as answer:
                self._resumed(answer)
            case Resync(chats=chats):
                for chat in chats:
                    self.copies.setdefault(chat.chat_id, Copy()).wanted = True
            case Heartbeat(heads=heads):
                for chat_id, (epoch, head) in heads.items():
                    copy = self.copies.setdefault(chat_id, Copy())
                    copy.wanted = copy.wanted or (epoch, head) != (copy.epoch, copy.cursor)
                return [HeartbeatAck()]
            case Error() as error:
                self._failed(error, frame.request_id)
            case ReplyTextDelta() | ReplyTextState() as reply:
                event = self.texts.on_frame(reply)
                if event is None:  # it ended before the client saw any of it
                    assert isinstance(reply, ReplyTextState)
                    assert reply.state == "done"
                else:
                    assert event.text == "x" * (reply.to_entry - 1)
            case ConnectionEstablished() | ConnectionClosing():
                pass
            case other:
                raise AssertionError(other)
        return []

    def _pushed(self, message: Message) -> list[AnyClientFrame]:
        copy = self.copies.setdefault(message.chat_id, Copy())
        if copy.epoch and message.sequence == copy.cursor + 1:
            copy.messages.append(message.message_id)
            copy.wanted = copy.wanted or message.kind == "event"  # of leaving: a pull shows it
            return [Ack(payload=AckBody(message.chat_id, copy.epoch, copy.cursor))]
        copy.wanted = copy.wanted or not copy.epoch or message.sequence > copy.cursor
        return []

    def _settle(self, page: Page | ResumedChat, request_id: str | None) -> None:
        copy = self.copies.get(page.chat_id)
        if copy is None or (request_id is not None and copy.asked != request_id):
            return
        copy.asked = None
        if page.reset:
            copy.epoch, copy.messages = page.epoch, []
        elif not copy.epoch:
            copy.epoch = page.epoch
        elif page.epoch != copy.epoch:
            copy.wanted = True
            return
        for message in page.messages:
            if message.sequence > copy.cursor:
                assert message.sequence == copy.cursor + 1, "a page continues the cursor"
                copy.messages.append(message.message_id)
        assert copy.cursor >= page.through
        copy.wanted = copy.wanted or page.has_more

    def _resumed(self, answer: Resumed) -> None:
        self.resuming = None
        for chat_id in answer.gone:
            self.copies.pop(chat_id, None)
        for chat_id in answer.joined:
            self.copies.setdefault(chat_id, Copy())
        for chat in answer.chats:
            self._settle(chat, None)
        for copy in self.copies.values():
            copy.wanted = copy.wanted or not copy.epoch

    def _failed(self, error: Error, request_id: str | None) -> None:
        for chat_id, copy in list(self.copies.items()):
            if request_id is not None and copy.asked == request_id:
                copy.asked, copy.wanted = None, True
                if error.code == "NOT_A_MEMBER":
                    del self.copies[chat_id]
        if request_id is not None and self.resuming == request_id:
            self.resuming = None
            self.resume_failed = True


class Protocol(RuleBasedStateMachine):
    """The world around one client."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(7)
        self.store = Store()
        self.client = Client()
        self.now = 0.0
        self.fetches: list[Fetch | FetchResume] = []
        self.read: list[tuple[Fetch | FetchResume, Page | ResumeRead | HoldfastError]] = []
        self.undelivered: dict[str, list[tuple[int, int]]] = {chat_id: [] for chat_id in CHATS}
        self.reading = True
        self.unread: list[AnyClientFrame] = []
        self.warned_at: float | None = None
        self.growing: dict[str, GrowingReply] = {}

    @initialize(heads=st.tuples(*[st.integers(0, 8)] * 3))
    def begin(self, heads: tuple[int, ...]) -> None:
        self.store.head = dict(zip(CHATS, heads, strict=True))
        self.connect()

    def connect(self) -> None:
        self.session = Session(LIMITS, "conn_1", AS_ANN, "phone", self.now, None, self.rng)
        self.fetches, self.read, self.unread = [], [], []
        self.reading = True
        self.warned_at = None
        memberships = {chat_id: self.store.cursor(chat_id) for chat_id in self.store.members}
        self.carry_out(self.session.establish(memberships, AT))
        self.say(self.client.reconnected())

    def carry_out(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Fetch() | FetchResume():
                    self.fetches.append(effect)
                    assert len(self.fetches) + len(self.read) == 1, "one pull at a time"
                case PauseReading():
                    self.reading = False
                case ResumeReading():
                    self.reading = True
                case Close(closing=closing):
                    self.closed(closing)
                    return
                case Delivered(chat_id=chat_id, epoch=epoch, sequence=sequence):
                    assert (epoch, sequence) <= (
                        self.store.epoch[chat_id],
                        self.store.head[chat_id],
                    )
                case _:
                    pass

    def closed(self, closing: CloseReason) -> None:
        """The connection is lost with what it did not write; the client reconnects."""
        last = decoded(self.session.take(1 << 30))
        assert isinstance(last[-1].payload, ConnectionClosing)
        self.note_warnings(last)
        assert closing.reconnect_allowed, "this client breaks no rule"
        if closing is CloseReason.SLOW_CONSUMER:
            assert self.warned_at is not None
            assert self.now - self.warned_at >= 5
        self.connect()

    def note_warnings(self, frames: list[ServerFrame]) -> None:
        """The warning was queued no later than it was taken, so counting from here is
        too strict only for the test.
        """
        if any(
            isinstance(frame.payload, Error) and frame.payload.code == "SLOW_CONSUMER"
            for frame in frames
        ):
            self.warned_at = self.warned_at if self.warned_at is not None else self.now

    def say(self, frames: list[AnyClientFrame]) -> None:
        """The client's frames reach the session, or wait while it does not read."""
        self.unread += frames
        while self.reading and self.unread:
            self.carry_out(self.session.receive(self.unread.pop(0), self.now))

    @rule(chat_id=st.sampled_from(CHATS), count=st.integers(1, 6))
    def commit(self, chat_id: str, count: int) -> None:
        first = self.store.head[chat_id] + 1
        self.store.head[chat_id] += count
        self.undelivered[chat_id].append((first, first + count - 1))

    @rule(chat_id=st.sampled_from(CHATS))
    def deliver(self, chat_id: str) -> None:
        if self.undelivered[chat_id]:
            first, last = self.undelivered[chat_id].pop(0)
            if chat_id in self.store.members:
                run = self.store.run(chat_id, first, last)
                if self.rng.random() < 0.5 and self.session.deliver_at_once(run):
                    self.client.inbox += decoded([run.data])
                else:
                    self.carry_out(self.session.deliver(run, self.now))

    @rule(chat_id=st.sampled_from(CHATS))
    def skip(self, chat_id: str) -> None:
        if self.undelivered[chat_id]:
            self.undelivered[chat_id].pop(0)

    @rule(chat_id=st.sampled_from(CHATS), back=st.integers(0, 5), count=st.integers(1, 6))
    def deliver_again(self, chat_id: str, back: int, count: int) -> None:
        """Something that was delivered before, alone or with what follows it."""
        end = (
            self.undelivered[chat_id][0][0] - 1
            if self.undelivered[chat_id]
            else self.store.head[chat_id]
        )
        first = max(1, end - back)
        last = min(end, first + count - 1)
        if last >= first and chat_id in self.store.members:
            self.carry_out(self.session.deliver(self.store.run(chat_id, first, last), self.now))

    @rule(chat_id=st.sampled_from(CHATS), entries=st.integers(0, 3), ends=st.booleans())
    def reply_grows(self, chat_id: str, entries: int, ends: bool) -> None:
        """An assistant writes; a reply that has ended is followed by another one."""
        growing = self.growing.get(chat_id)
        if growing is None:
            number = len(self.growing) + self.rng.randrange(1 << 30)
            growing = self.growing[chat_id] = GrowingReply(chat_id, f"reply_{number}", "bot", 1)
        for _ in range(entries):
            growing.append(growing.next_entry, "x")
        growing.publish()
        if ends and growing.next_entry > 5:
            growing.end("done")
            del self.growing[chat_id]
        if chat_id in self.store.members:
            self.carry_out(self.session.on_reply_grown(growing))

    @rule(bytes_max=st.sampled_from([1, 200, 1000, 1 << 20]))
    def take(self, bytes_max: int) -> None:
        frames = decoded(self.session.take(bytes_max))
        for frame in frames:
            if isinstance(frame.payload, ReplyTextDelta | ReplyTextState):
                assert frame.payload.chat_id in self.session.chats
        self.note_warnings(frames)
        self.client.inbox += frames
        self.carry_out(self.session.on_written(self.now))
        self.say([])

    @rule()
    def take_run(self) -> None:
        if (data := self.session.take_single()) is not None:
            self.client.inbox += decoded([data])

    @rule(count=st.integers(1, 10))
    def client_reads(self, count: int) -> None:
        for _ in range(min(count, len(self.client.inbox))):
            if self.client.inbox:
                self.say(self.client.process())

    @rule()
    def client_pulls(self) -> None:
        self.say(self.client.pulls())

    @precondition(lambda self: self.fetches)
    @rule()
    def store_reads(self) -> None:
        effect = self.fetches.pop(0)
        self.read.append((effect, self.store.read(effect)))

    @precondition(lambda self: self.fetches)
    @rule()
    def store_fails(self) -> None:
        self.read.append((self.fetches.pop(0), Unavailable("down")))

    @precondition(lambda self: self.read)
    @rule()
    def page_arrives(self) -> None:
        effect, result = self.read.pop(0)
        if isinstance(effect, Fetch):
            assert not isinstance(result, ResumeRead)
            self.carry_out(self.session.on_page(effect.token, result, self.now))
        else:
            assert not isinstance(result, Page)
            self.carry_out(self.session.on_page(effect.token, result, self.now))

    @rule()
    def everything_flows(self) -> None:
        """Nobody is slow for a while, so that chats become live: alone, the other rules
        rarely bring that about.
        """
        for _ in range(10):
            self.take(1 << 20)
            self.client_reads(1000)
            self.client_pulls()
            if self.fetches:
                self.store_reads()
            if self.read:
                self.page_arrives()

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 6.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        """Like the gateway: tick whenever the session has something to do."""
        end = self.now + seconds
        for _ in range(100):
            due = max(self.session.next_tick, self.now)
            if due > end:
                break
            self.now = due
            self.carry_out(self.session.tick(self.now))
        self.now = end

    @rule()
    def heads_are_asked(self) -> None:
        for chat_id in list(self.session.chats):
            self.session.on_head(chat_id, self.store.cursor(chat_id), self.now)

    @rule(chat_id=st.sampled_from(CHATS), heard=st.booleans())
    def member_comes_or_goes(self, chat_id: str, heard: bool) -> None:
        self.undelivered[chat_id].clear()
        if chat_id in self.store.members:
            event = self.store.leave(chat_id)
            if heard:
                self.carry_out(self.session.deliver(event, self.now))
            self.carry_out(self.session.on_membership(chat_id, None, event_delivered=heard))
        else:
            self.store.members.add(chat_id)
            epoch = self.rng.choice([0, self.store.epoch[chat_id]])
            self.carry_out(
                self.session.on_membership(chat_id, Cursor(epoch, self.store.head[chat_id]))
            )

    @rule(chat_id=st.sampled_from(CHATS))
    def epoch_is_raised(self, chat_id: str) -> None:
        self.store.epoch[chat_id] += 1

    @rule(chance=st.integers(0, 9))
    def connection_breaks(self, chance: int) -> None:
        """Seldom: it heals whatever this connection did wrong."""
        if chance == 9:
            self.connect()

    @invariant()
    def buffers_are_within_their_bounds(self) -> None:
        if not hasattr(self, "session"):
            return
        assert self.session.waiting_messages <= 20
        assert self.session.open_requests <= 6
        assert len(self.session._outbound.lanes.control) <= 8 + 6 + 3

    @invariant()
    def what_the_client_has_is_a_prefix_in_order_once(self) -> None:
        for chat_id, copy in self.client.copies.items():
            assert copy.messages == [f"msg_{chat_id}_{n}" for n in range(1, copy.cursor + 1)]
            assert copy.cursor <= self.store.head[chat_id]

    def teardown(self) -> None:
        """Let everything come to rest: nothing new is committed, what fanout has not
        delivered it never will.
        """
        if not hasattr(self, "session"):
            return
        for chat_id in CHATS:
            self.undelivered[chat_id].clear()
        for _ in range(100):
            self.everything_flows()
            if self.complete():
                return
            self.heads_are_asked()
            self.time_passes(6.0)
        raise AssertionError(
            {c: (m.epoch, m.cursor) for c, m in self.client.copies.items()}, self.store.__dict__
        )

    def complete(self) -> bool:
        """The client has every message of its chats, and knows its chats."""
        return self.client.copies.keys() == self.store.members and all(
            (copy := self.client.copies.get(chat_id)) is not None
            and (copy.epoch, copy.cursor) == self.store.cursor(chat_id)
            for chat_id in self.store.members
        )


Protocol.TestCase.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestProtocol = Protocol.TestCase
