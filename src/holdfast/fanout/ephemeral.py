"""Typing, presence and receipts: notes that are worthless a moment later.

Each note has a key: its kind, user and chat. A newer note replaces a waiting one with
the same key, and at most one per key is sent each second. Chats above 100 members get
none, and each user's typing is rate-limited. Notes beyond a bound are dropped and
counted: none is worth a resync, and nothing waits for one.

A note goes to the sessions of this node and, as one notification of the bus, to the
other nodes. Each of them sends it to its own sessions, within its own bounds: it trusts
no other node to stop typing, and no order of presences but the registry's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, assert_never

from holdfast import telemetry
from holdfast.bounds import positive
from holdfast.clock import Clock, Turns, timestamp, wait_at_most
from holdfast.errors import HoldfastError
from holdfast.fanout.bus.contract import (
    Bus,
    EphemeralNotification,
    PresenceChanged,
    ReceiptMoved,
    Status,
    TypingChanged,
)
from holdfast.fanout.members import Members
from holdfast.fanout.receipts import Receipts
from holdfast.message import Cursor, LogEntry, User, Watermark
from holdfast.resilience import Buckets
from holdfast.wire.codec import encode_frame
from holdfast.wire.frames import Presence, Receipt, Typing

LATE_SECONDS = 10
"""Within this time notifications of other nodes may overtake each other."""
GATHER_SECONDS = 0.02
"""Users who connect or disconnect within this time are looked up in one read, and their
presence goes out in one write to each session that shares a chat with them.
"""

_Key = tuple[str, ...]
_MembershipsOf = Mapping[User, Mapping[str, Cursor]]


class Sessions(Protocol):
    """The reachable sessions. A new frame replaces a waiting one with the same key."""

    async def push_to_chats(self, chat_ids: Iterable[str], key: _Key, frame: bytes) -> None:
        """Push to every session in these chats, once each. Yields to other work."""
        ...

    def push_to_user(self, user: User, chat_id: str, key: _Key, frame: bytes) -> None:
        """Push to the user's sessions that are in the chat."""
        ...


@dataclass(frozen=True, slots=True)
class EphemeralSettings:
    """The bounds of the notes that are sent, that wait, and that are remembered."""

    interval_seconds: float = 1
    """Typing, presence and receipts of one user and chat are sent at most once per
    interval; the newest wins.
    """
    typing_seconds: float = 10
    """Typing ends by itself after this time."""
    typing_per_second: float = 5
    """Typing notes of one user that are sent, in all chats together; each goes to all
    members of its chat. Above: dropped and counted.
    """
    typing_burst: int = 20
    """Typing notes of one user allowed in a burst before the rate applies."""
    max_chat_members: int = 100
    """Larger chats get no typing, presence or receipts."""
    max_waiting: int = 10_000
    """Notes waiting to be sent. Further ones are dropped and counted."""
    max_presence_chats: int = 100
    """A user's presence is sent to at most this many of their chats."""
    max_presences: int = 50
    """Users whose presence is sent per round, so that many connecting at once do not
    delay typing; the others follow.
    """
    max_last_seen: int = 100_000
    """Users whose last presence is remembered; the least recently used is forgotten."""
    lookup_timeout_seconds: float = 1
    """How long to wait for a chat's members; then the note is dropped."""

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


@dataclass(frozen=True, slots=True)
class _Note:
    """A note to send. ``chat_id`` None: to everybody who shares a chat with ``about``.
    ``to``: to this user only. ``at``: when a presence changed.

    ``shared``: another node sent it, to these chats.
    """

    about: User
    payload: Typing | Presence | Receipt
    chat_id: str | None = None
    to: User | None = None
    at: int = 0
    shared: Sequence[str] | None = None

    @property
    def kind(self) -> str:
        return self.payload.type

    @property
    def key(self) -> _Key:
        chat = self.chat_id or ""
        reader = "" if self.to is None else self.to.user_id
        return (self.kind, self.about.tenant, self.about.user_id, chat, reader)


class Ephemeral:
    """Collects notes and sends them. ``run`` must be running, until it is cancelled."""

    def __init__(
        self,
        members: Members,
        memberships: Callable[[Sequence[User]], Awaitable[_MembershipsOf]],
        clock: Clock,
        bus: Bus,
        settings: EphemeralSettings | None = None,
    ) -> None:
        self._sessions: Sessions
        self._bus = bus
        self._members = members
        self._memberships = memberships
        self._clock = clock
        self._settings = settings or EphemeralSettings()
        self._receipts = Receipts()
        self._ready: dict[_Key, _Note] = {}
        self._ready_presences: dict[_Key, _Note] = {}
        self._held: dict[_Key, _Note] = {}
        """Changed within a second of being sent: waits until the second is over."""
        self._sent_at: OrderedDict[_Key, float] = OrderedDict()
        self._typing: OrderedDict[tuple[str, User], tuple[float, _Note]] = OrderedDict()
        """Until when, and the note that ends it."""
        self._typing_rates = Buckets(self._settings.typing_per_second, self._settings.typing_burst)
        self._last_seen: OrderedDict[User, int] = OrderedDict()
        self._news = asyncio.Event()
        self._gathers = False
        """A timer is running that lets further presences join the next round."""

    def connect(self, sessions: Sessions) -> None:
        """Set the sessions that receive notes; call it before ``run``."""
        self._sessions = sessions

    def typing(self, user: User, chat_id: str, active: bool) -> None:
        """The user started or stopped typing. Without a new start, typing stops by
        itself after 10 s.
        """
        self._type(_Note(user, Typing(chat_id, user.user_id, active), chat_id=chat_id))

    def _type(self, note: _Note, *, rated: bool = True) -> None:
        payload = note.payload
        assert isinstance(payload, Typing)
        key = (payload.chat_id, note.about)
        if rated and self._exceeds_rate(note):
            telemetry.ephemeral(note.kind, "dropped")
        elif not payload.active:
            if self._put(note):
                self._typing.pop(key, None)
        elif key not in self._typing and len(self._typing) >= self._settings.max_waiting:
            telemetry.ephemeral(note.kind, "dropped")  # if sent, nothing would ever end it
        elif self._put(note):
            until = self._clock.monotonic() + self._settings.typing_seconds
            end = Typing(payload.chat_id, payload.user_id, active=False)
            self._typing[key] = (until, replace(note, payload=end))
            self._typing.move_to_end(key)

    def _exceeds_rate(self, note: _Note) -> bool:
        """Whether the user types too often. Replacing a waiting note costs nothing."""
        if note.key in self._ready or note.key in self._held:
            return False
        return self._typing_rates.take(note.about, self._clock.monotonic()) > 0

    def presence(self, user: User, status: Status, at: int) -> None:
        """The user's first connection anywhere opened, or the last one closed, at this
        time of the registry.
        """
        if self._is_newer(user, at):
            self._put(_Note(user, Presence(user.user_id, status, _seen(at)), at=at))

    def _is_newer(self, user: User, at: int) -> bool:
        """Whether this presence did not come too late. A much older one is of a clock
        that was set back.
        """
        last = self._last_seen.get(user, 0)
        if last - LATE_SECONDS * 1_000_000 < at < last:
            return False
        self._last_seen[user] = at
        self._last_seen.move_to_end(user)
        if len(self._last_seen) > self._settings.max_last_seen:
            self._last_seen.popitem(last=False)
        return True

    def last_seen(self, user: User) -> str | None:
        """When the user last connected or disconnected, if this node remembers it."""
        at = self._last_seen.get(user)
        return None if at is None else _seen(at)

    def on_notification(self, notification: EphemeralNotification) -> None:
        """Another node sent this note; its sessions have it already."""
        about = notification.about
        match notification:
            case TypingChanged(chat_id=chat_id, active=active):
                typing = Typing(chat_id, about.user_id, active)
                self._type(_Note(about, typing, chat_id=chat_id, shared=(chat_id,)))
            case PresenceChanged(status=status, at=at, chat_ids=chat_ids):
                if self._is_newer(about, at):
                    presence = Presence(about.user_id, status, _seen(at))
                    self._put(_Note(about, presence, at=at, shared=chat_ids))
            case ReceiptMoved(to=to, chat_id=chat_id, delivered=delivered, read=read):
                receipt = Receipt(chat_id, about.user_id, delivered=delivered, read=read)
                self._put(_Note(about, receipt, chat_id=chat_id, to=to, shared=(chat_id,)))
            case _:
                assert_never(notification)

    def on_entries(self, entries: Sequence[LogEntry]) -> None:
        """Remember the senders of this batch, for the receipts that will follow."""
        self._receipts.on_entries(entries)

    def on_watermarks_moved(self, watermarks: Sequence[Watermark]) -> None:
        """Send receipts for watermarks that moved in the last second."""
        for sender, reader, receipt in self._receipts.of(watermarks):
            self._put(_Note(reader, receipt, chat_id=receipt.chat_id, to=sender))

    async def run(self) -> None:
        """Send waiting notes: at once, or a second after the last of their key."""
        while True:
            await wait_at_most(self._news, self._settings.interval_seconds)
            self._news.clear()
            await self.send_due()

    async def send_due(self) -> None:
        """One round over the notes that are due. The chats of all users whose presence
        changed are read once. Yields to other work.
        """
        now = self._clock.monotonic()
        self._stop_typing(now)
        self._release(now)
        presences = dict(islice(self._ready_presences.items(), self._settings.max_presences))
        memberships: _MembershipsOf | None = None
        due = [
            *((self._ready, key) for key in self._ready),
            *((self._ready_presences, key) for key in presences),
        ]
        turns = Turns(self._clock)
        for number, (ready, key) in enumerate(due):
            await turns.give_way()
            note = ready.pop(key, None)
            if note is None:  # a newer presence of the user replaced it
                continue
            self._sent_at[key] = now
            try:
                async with asyncio.timeout(self._settings.lookup_timeout_seconds):
                    if key in presences and memberships is None:
                        memberships = await self._memberships(
                            [presence.about for presence in presences.values()]
                        )
                    await self._send(note, memberships or {})
            except (HoldfastError, TimeoutError):
                telemetry.ephemeral(note.kind, "dropped")
                self._drop(due[number + 1 :])
                return

    def _release(self, now: float) -> None:
        """Make notes ready whose key was last sent long enough ago."""
        edge = now - self._settings.interval_seconds
        while self._sent_at:
            key, at = next(iter(self._sent_at.items()))
            if at > edge:
                return
            del self._sent_at[key]
            if (note := self._held.pop(key, None)) is not None:
                self._ready_for(note)[key] = note

    def _ready_for(self, note: _Note) -> dict[_Key, _Note]:
        """Presences of this node's users wait for a lookup of their chats."""
        looked_up = note.kind == Presence.type and note.shared is None
        return self._ready_presences if looked_up else self._ready

    async def _send(self, note: _Note, memberships: _MembershipsOf) -> None:
        chats = note.shared
        if chats is None:
            chats = await self._chats_of(note, memberships)
            if not chats and note.chat_id is not None:
                telemetry.ephemeral(note.kind, "dropped")
                return
            self._bus.publish(_notification(note, chats))
        frame = encode_frame(note.payload)
        if note.to is None:
            await self._sessions.push_to_chats(chats, note.key, frame)
        else:
            self._sessions.push_to_user(note.to, chats[0], note.key, frame)
        telemetry.ephemeral(note.kind, "told")

    async def _chats_of(self, note: _Note, memberships: _MembershipsOf) -> Sequence[str]:
        """The chats whose sessions get the note."""
        if note.chat_id is None:
            return await self._shared_chats(note.about, memberships[note.about])
        concerned = await self._concerns(note.to, note.about.tenant, note.chat_id)
        return (note.chat_id,) if concerned else ()

    async def _shared_chats(self, user: User, memberships: Iterable[str]) -> list[str]:
        chats = islice(memberships, self._settings.max_presence_chats)
        return [chat_id for chat_id in chats if await self._small(user.tenant, chat_id)]

    async def _small(self, tenant: str, chat_id: str) -> bool:
        return await self._concerns(None, tenant, chat_id)

    async def _concerns(self, user: User | None, tenant: str, chat_id: str) -> bool:
        """Whether the chat is small enough, and ``user``, if given, is still in it."""
        members = await self._members.of(tenant, chat_id)
        return len(members) <= self._settings.max_chat_members and (user is None or user in members)

    def _stop_typing(self, now: float) -> None:
        while self._typing:
            until, end = next(iter(self._typing.values()))
            if until > now or self._is_full:
                return
            self._type(end, rated=False)

    @property
    def _is_full(self) -> bool:
        return (
            len(self._ready) + len(self._ready_presences) + len(self._held)
            >= self._settings.max_waiting
        )

    def _put(self, note: _Note) -> bool:
        """Queue a note. Returns False if there was no room."""
        key = note.key
        self._release(self._clock.monotonic())
        waiting = self._held if key in self._sent_at else self._ready_for(note)
        if waiting is self._ready:
            self._ready_presences.pop(key, None)
        elif waiting is self._ready_presences:
            self._ready.pop(key, None)
        if key in waiting:
            telemetry.ephemeral(note.kind, "merged")
        elif self._is_full:
            telemetry.ephemeral(note.kind, "dropped")
            return False
        waiting[key] = note
        if waiting is self._ready:
            self._news.set()
        elif waiting is self._ready_presences and not self._gathers:
            self._gathers = True
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._gathered)
        return True

    def _gathered(self) -> None:
        self._gathers = False
        self._news.set()

    def _drop(self, due: Iterable[tuple[dict[_Key, _Note], _Key]]) -> None:
        """Drop the rest of a round: no note is worth waiting for a store in trouble."""
        for ready, key in due:
            ready.pop(key, None)
            telemetry.ephemeral(key[0], "dropped")


def _seen(at: int) -> str:
    return timestamp(at / 1_000_000)


def _notification(note: _Note, chats: Sequence[str]) -> EphemeralNotification:
    """What the other nodes get."""
    match note.payload:
        case Typing(chat_id=chat_id, active=active):
            return TypingChanged(note.about, chat_id, active)
        case Presence(status=status):
            return PresenceChanged(note.about, status, note.at, tuple(chats))
        case Receipt(chat_id=chat_id, delivered=delivered, read=read):
            assert note.to is not None
            return ReceiptMoved(note.about, note.to, chat_id, delivered, read)
        case _:
            assert_never(note.payload)
