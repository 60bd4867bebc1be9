"""Typing, presence and receipts: notes that are worthless a moment later.

Each note has a key: its kind, user and chat. A newer note replaces a waiting one with
the same key, and at most one per key is sent each second. Chats above 100 members get
none, and each user's typing is rate-limited. Notes beyond a bound are dropped and
counted: none is worth a resync, and nothing waits for one.

Frames go to the sessions of this node. With several nodes, ``Sessions`` becomes an
adapter that reaches the others too.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol

from holdfast import telemetry
from holdfast.bounds import positive
from holdfast.clock import Clock, Turns, timestamp, wait_at_most
from holdfast.errors import HoldfastError
from holdfast.fanout.members import Members
from holdfast.fanout.receipts import Receipts
from holdfast.message import Cursor, LogEntry, User, Watermark
from holdfast.resilience import Buckets
from holdfast.wire.codec import encode_frame
from holdfast.wire.frames import Presence, Receipt, Typing

Status = Literal["online", "offline"]
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
    ``to``: to this user only.
    """

    about: User
    payload: Typing | Presence | Receipt
    chat_id: str | None = None
    to: User | None = None

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
        settings: EphemeralSettings | None = None,
    ) -> None:
        self._sessions: Sessions
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
        self._typing: OrderedDict[tuple[str, User], float] = OrderedDict()
        self._typing_rates = Buckets(self._settings.typing_per_second, self._settings.typing_burst)
        self._last_seen: OrderedDict[User, str] = OrderedDict()
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
        self._type(user, chat_id, active, rated=True)

    def _type(self, user: User, chat_id: str, active: bool, *, rated: bool) -> None:
        note = _Note(user, Typing(chat_id, user.user_id, active), chat_id=chat_id)
        if rated and self._exceeds_rate(note):
            telemetry.ephemeral(note.kind, "dropped")
        elif not active:
            if self._put(note):
                self._typing.pop((chat_id, user), None)
        elif (chat_id, user) not in self._typing and len(
            self._typing
        ) >= self._settings.max_waiting:
            telemetry.ephemeral(note.kind, "dropped")  # if sent, nothing would ever end it
        elif self._put(note):
            self._typing[chat_id, user] = self._clock.monotonic() + self._settings.typing_seconds
            self._typing.move_to_end((chat_id, user))

    def _exceeds_rate(self, note: _Note) -> bool:
        """Whether the user types too often. Replacing a waiting note costs nothing."""
        if note.key in self._ready or note.key in self._held:
            return False
        return self._typing_rates.take(note.about, self._clock.monotonic()) > 0

    def presence(self, user: User, status: Status) -> None:
        """The user's first connection opened, or the last one closed."""
        seen = timestamp(self._clock.now())
        self._last_seen[user] = seen
        self._last_seen.move_to_end(user)
        if len(self._last_seen) > self._settings.max_last_seen:
            self._last_seen.popitem(last=False)
        self._put(_Note(user, Presence(user.user_id, status, seen)))

    def last_seen(self, user: User) -> str | None:
        """When the user last connected or disconnected, if this node remembers it."""
        return self._last_seen.get(user)

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
            note = ready.pop(key)
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
        return self._ready_presences if note.kind == Presence.type else self._ready

    async def _send(self, note: _Note, memberships: _MembershipsOf) -> None:
        frame = encode_frame(note.payload)
        if note.chat_id is None:
            shared = await self._shared_chats(note.about, memberships[note.about])
            await self._sessions.push_to_chats(shared, note.key, frame)
        elif not await self._concerns(note.to, note.about.tenant, note.chat_id):
            telemetry.ephemeral(note.kind, "dropped")
            return
        elif note.to is None:
            await self._sessions.push_to_chats((note.chat_id,), note.key, frame)
        else:
            self._sessions.push_to_user(note.to, note.chat_id, note.key, frame)
        telemetry.ephemeral(note.kind, "told")

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
            (chat_id, user), until = next(iter(self._typing.items()))
            if until > now or self._is_full:
                return
            self._type(user, chat_id, False, rated=False)

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
