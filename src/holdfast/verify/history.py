"""A history: what clients did and saw, and what was stored at the end.

The format is stable: JSON lines, one event a line. The first line is a ``header``
(format version, seed, notes). Every other line has ``event`` (its kind) and ``at``
(seconds, from one clock). An operation is an ``invoke`` and at most one of ``ok``,
``fail`` (certainly did not happen) or ``unknown`` (may have happened), joined by
``op``. A timeout is unknown, never failed. Every attempt is an operation of its own: a
retry has another ``op`` and the same ``key``.

A history has digests in place of contents, so it can be shared. Unknown kinds and
fields are an error: a checker must not pass because it did not understand an event.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, field

from holdfast.message import Cursor, Message, Page

FORMAT_VERSION = 1

Verb = Literal["send", "sync", "resume", "change"]
FaultPlane = Literal["connection", "durability", "history", "fanout", "process"]


def digest(content: str, content_type: str) -> str:
    """The digest that a history has in place of a content."""
    return hashlib.blake2b(f"{content_type}\0{content}".encode(), digest_size=8).hexdigest()


class Sighting(Struct, frozen=True):
    """A message as seen by an observer.

    ``digest`` None: only its number was seen (an ack).
    """

    sequence: int
    message_id: str
    sender_id: str | None = None
    key: str | None = None
    digest: str | None = None
    kind: str = "text"

    @staticmethod
    def of(message: Message) -> Sighting:
        return Sighting(
            message.sequence,
            message.message_id,
            message.sender_id,
            message.client_message_id,
            digest(message.content, message.content_type),
            message.kind,
        )


class PageSeen(Struct, frozen=True):
    """A page as a client got it; ``after``: the request's cursor, if any."""

    chat_id: str
    after: Cursor | None
    epoch: int
    messages: Sequence[Sighting]
    through: int
    has_more: bool
    head: int
    reset: bool

    @staticmethod
    def of(page: Page, after: Cursor | None) -> PageSeen:
        seen = [Sighting.of(m) for m in page.messages]
        return PageSeen(
            page.chat_id,
            after,
            page.epoch,
            seen,
            page.through,
            page.has_more,
            page.head,
            page.reset,
        )


class HistoryEvent(
    Struct, frozen=True, tag_field="event", forbid_unknown_fields=True, kw_only=True
):
    """One line."""

    at: float = 0.0


class Header(HistoryEvent, frozen=True, tag="header"):
    """The origin of this history: the seed and everything derived from it."""

    version: int = FORMAT_VERSION
    seed: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)


class ClientSeen(HistoryEvent, frozen=True, tag="client"):
    """A client and its identity."""

    client: str
    tenant: str
    user_id: str
    device_id: str


class Invoke(HistoryEvent, frozen=True, tag="invoke"):
    """A request: ``key`` and ``digest`` of a send, ``cursors`` of a sync or resume."""

    op: int
    client: str
    verb: Verb
    chat_id: str = ""
    key: str | None = None
    digest: str | None = None
    cursors: dict[str, Cursor] = field(default_factory=dict)


class Ok(HistoryEvent, frozen=True, tag="ok"):
    op: int
    acked: Sighting | None = None
    deduplicated: bool = False
    pages: Sequence[PageSeen] = ()


class Fail(HistoryEvent, frozen=True, tag="fail"):
    op: int
    code: str


class Unknown(HistoryEvent, frozen=True, tag="unknown"):
    """``answered``: by the server. ``disconnected``: the connection broke. ``timeout``:
    the client gave up.
    """

    op: int
    reason: Literal["answered", "disconnected", "timeout"]
    code: str = ""


class Opened(HistoryEvent, frozen=True, tag="opened"):
    client: str
    connection: str


class Pushed(HistoryEvent, frozen=True, tag="pushed"):
    """The server pushed a message to a client."""

    client: str
    connection: str
    chat_id: str
    message: Sighting


class EphemeralSeen(HistoryEvent, frozen=True, tag="whispered"):
    """An ephemeral event of a chat reached a client: typing, a receipt, or a
    growing reply.
    """

    client: str
    chat_id: str
    kind: str


class CursorMoved(HistoryEvent, frozen=True, tag="moved"):
    """A client acked a chat up to ``sequence``."""

    client: str
    chat_id: str
    epoch: int
    sequence: int


class Dropped(HistoryEvent, frozen=True, tag="dropped"):
    """A client dropped its copy of a chat, after leaving it or after a reset."""

    client: str
    chat_id: str


class WarningSeen(HistoryEvent, frozen=True, tag="warned"):
    """The server sent SLOW_CONSUMER, with its grace."""

    connection: str
    grace_seconds: float


class ClosingSeen(HistoryEvent, frozen=True, tag="closing"):
    connection: str
    reason: str


class Closed(HistoryEvent, frozen=True, tag="closed"):
    """A connection ended. ``by``: a network fault or a killed process is ``network``.

    ``why``: the deadline after which a client gave up; empty if it left by itself.
    """

    client: str
    connection: str
    by: Literal["server", "client", "network"]
    why: str = ""


class Level(HistoryEvent, frozen=True, tag="level"):
    """How full a bounded buffer or queue was."""

    where: str
    value: int
    bound: int


class Tried(HistoryEvent, frozen=True, tag="tried"):
    """The fanout tried to deliver an envelope for the ``attempt``-th time."""

    gateway: str
    envelope: int
    attempt: int


class FaultWindow(HistoryEvent, frozen=True, tag="fault"):
    """An injected fault, from ``at`` to ``until``; ``clients`` empty: for all."""

    plane: FaultPlane
    name: str
    until: float
    clients: Sequence[str] = ()


class CommitSeen(HistoryEvent, frozen=True, tag="committed"):
    """The store committed this message."""

    chat_id: str
    sequence: int


class CommitsLost(HistoryEvent, frozen=True, tag="commits_lost"):
    """The store's engine lost committed messages, by a failover or a restore, and kept
    those up to ``kept``. No server keeps a promise about them; their epoch is over.
    """

    chat_id: str
    kept: int
    message_ids: Sequence[str]


class Logged(HistoryEvent, frozen=True, tag="logged"):
    """At the end: the event log has this message."""

    position: int
    chat_id: str
    sequence: int


class LogAtEnd(HistoryEvent, frozen=True, tag="log"):
    """At the end: the event log was read, up to this position. Without this event it
    was not read, and nothing is known of it.
    """

    position: int


class KeySeen(Struct, frozen=True):
    """One stored idempotency key."""

    sender_id: str
    key: str
    sequence: int
    message_id: str


class MembershipSpan(Struct, frozen=True):
    """The user's membership from message ``sequence`` on (0: from creation)."""

    sequence: int
    user_id: str
    member: bool
    muted: bool = False


class ChatAtEnd(HistoryEvent, frozen=True, tag="chat"):
    """At the end: one stored chat.

    ``redacted`` and ``holes``: those recorded as acts.
    """

    chat_id: str
    tenant: str
    epoch: int
    counter: int | None
    messages: Sequence[Sighting]
    keys: Sequence[KeySeen] | None = None
    memberships: Sequence[MembershipSpan] = ()
    first_sequence: int = 1
    redacted: Sequence[int] = ()
    holes: Sequence[tuple[int, int]] = ()


class Held(HistoryEvent, frozen=True, tag="held"):
    """At the end: a client's copy of a chat, in order, after time to catch up."""

    client: str
    chat_id: str
    epoch: int
    cursor: int
    messages: Sequence[tuple[int, str]]


class Enqueued(HistoryEvent, frozen=True, tag="job_enqueued"):
    """A job whose transaction was, or may have been (``certain`` False), committed.

    ``seq`` is its number.
    """

    stream: str
    seq: int
    certain: bool = True


class Ran(HistoryEvent, frozen=True, tag="job_ran"):
    """One run of a handler. ``released``: an operator let it pass its stream's failed
    head.
    """

    stream: str
    seq: int
    worker: str
    started: float
    ended: float
    succeeded: bool = True
    released: bool = False


class EffectSeen(HistoryEvent, frozen=True, tag="job_effect"):
    """A job's effect on the resource, in the order of application, with its fence."""

    stream: str
    seq: int
    fence: int


class Excused(HistoryEvent, frozen=True, tag="job_excused"):
    """A job without effect, by a recorded act or verdict (a dead letter)."""

    seq: int


class ReplyMade(HistoryEvent, frozen=True, tag="reply_made"):
    """What a reply's producer made in one epoch: a digest for each entry before the
    end, and the end: ``done``, the code of its error, or "" if it died.
    """

    reply: str
    epoch: int
    entries: Sequence[str]
    end: str = ""


class ReplySeen(HistoryEvent, frozen=True, tag="reply_seen"):
    """What one reader got of a reply over all its connections, in order; ``at``: its
    end.

    ``entries``: epoch, number and digest of each before the end. ``ends``: ``done`` or
    an error's code for each end that it got; ``aborted`` for a connection that broke
    and could not be resumed. None: it left by itself. ``resumable`` False: it was
    warned that others may not see this end.
    """

    reply: str
    reader: str
    entries: Sequence[tuple[int, int, str]]
    ends: Sequence[str] | None
    resumable: bool = True


AnyEvent = (
    Header
    | ClientSeen
    | Invoke
    | Ok
    | Fail
    | Unknown
    | Opened
    | Pushed
    | EphemeralSeen
    | CursorMoved
    | Dropped
    | WarningSeen
    | ClosingSeen
    | Closed
    | Level
    | Tried
    | FaultWindow
    | CommitSeen
    | CommitsLost
    | Logged
    | LogAtEnd
    | ChatAtEnd
    | Held
    | Enqueued
    | Ran
    | EffectSeen
    | Excused
    | ReplyMade
    | ReplySeen
)
E = TypeVar("E", bound=HistoryEvent)


class Operation(NamedTuple):
    """A request and its end; ``end`` None: it never ended."""

    invoke: Invoke
    end: Ok | Fail | Unknown | None


class History:
    """The events in the order of recording, with the views that checkers need."""

    def __init__(self, events: Iterable[AnyEvent]) -> None:
        self.events = list(events)
        self._by_kind: dict[type[HistoryEvent], list[Any]] = {}
        for event in self.events:
            self._by_kind.setdefault(type(event), []).append(event)
        ends = {e.op: e for e in self.events if isinstance(e, Ok | Fail | Unknown)}
        self.operations = [Operation(i, ends.get(i.op)) for i in self.of(Invoke)]
        self.clients = {c.client: c for c in self.of(ClientSeen)}
        self.chats = {c.chat_id: c for c in self.of(ChatAtEnd)}
        self.lost = {each for loss in self.of(CommitsLost) for each in loss.message_ids}
        self.ended_at = max((e.at for e in self.events), default=0.0)

    def of(self, kind: type[E]) -> list[E]:
        return self._by_kind.get(kind, [])

    def acks(self) -> Iterator[tuple[Invoke, Ok, Sighting]]:
        """Every send that was acknowledged and that the engine did not lose."""
        for invoke, end in self.operations:
            acked = end.acked if isinstance(end, Ok) else None
            if isinstance(end, Ok) and acked is not None and acked.message_id not in self.lost:
                yield invoke, end, acked

    def pages(self) -> Iterator[tuple[Invoke, Ok, PageSeen]]:
        """Every page that a client got."""
        for operation in self.operations:
            if isinstance(operation.end, Ok):
                for page in operation.end.pages:
                    yield operation.invoke, operation.end, page


class Recorder:
    """Collects events in memory; not thread-safe. Every attempt gets a new ``op``."""

    def __init__(self, header: Header | None = None) -> None:
        self.events: list[AnyEvent] = [header or Header()]
        self.connections: Counter[str] = Counter()
        """The number of connections that each client has opened."""
        self._ops = 0

    def note(self, event: AnyEvent) -> None:
        self.events.append(event)

    def invoke(self, at: float, client: str, verb: Verb, chat_id: str = "", **details: Any) -> int:
        self._ops += 1
        self.note(Invoke(at=at, op=self._ops, client=client, verb=verb, chat_id=chat_id, **details))
        return self._ops

    def history(self) -> History:
        return History(self.events)

    def save(self, path: Path) -> None:
        path.write_bytes(encode(self.events))


def encode(events: Iterable[AnyEvent]) -> bytes:
    """Events as JSON lines."""
    return msgspec.json.Encoder().encode_lines(list(events))


def load(path: Path) -> History:
    """Load a saved history; ValueError if it is invalid."""
    return decode(path.read_bytes())


def decode(data: bytes) -> History:
    try:
        events = msgspec.json.Decoder(AnyEvent).decode_lines(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"this is not a history of format {FORMAT_VERSION}: {error}") from None
    header = events[0] if events else None
    if not isinstance(header, Header) or header.version != FORMAT_VERSION:
        raise ValueError(f"a history starts with a header of version {FORMAT_VERSION}")
    return History(events)
