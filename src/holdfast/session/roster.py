"""Which sessions are here, by user and by chat. (Pure.)

A user has one session per device and at most ``connections_max``: a device's new socket replaces its old one,
a further device closes the oldest. The sessions of a chat are handed out as a tuple that never changes, so a delivery
may go through it while sessions come and go.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import Generic, Protocol, TypeVar

from holdfast.message import User


class Attached(Protocol):
    """What the roster needs to know of a session; it compares sessions by identity."""

    @property
    def user(self) -> User: ...

    @property
    def device_id(self) -> str: ...

    @property
    def chats(self) -> Collection[str]: ...

    def reads(self, chat_id: str) -> bool:
        """Whether its credential is good for the chat."""
        ...


S = TypeVar("S", bound=Attached)
NOBODY: Set[User] = frozenset()


class _Present(Generic[S]):
    """The sessions of a chat, and a set of users of whom it is known that all are among them.

    Sessions come and go in a dict; a delivery goes through a tuple. Each is made from the other when it is needed, so
    that a thousand who come or go together cost one tuple and not a thousand.
    """

    __slots__ = ("_changing", "_settled", "covered")

    def __init__(self) -> None:
        self._changing: dict[S, None] | None = None
        self._settled: tuple[S, ...] = ()
        self.covered = NOBODY

    @property
    def sessions(self) -> tuple[S, ...]:
        if self._changing is not None:
            self._settled, self._changing = tuple(self._changing), None
        return self._settled

    @property
    def changing(self) -> dict[S, None]:
        if self._changing is None:
            self._changing, self._settled = dict.fromkeys(self._settled), ()
        return self._changing


class Roster(Generic[S]):
    """The sessions of one gateway."""

    def __init__(self, connections_max: int = 5) -> None:
        if connections_max < 1:
            raise ValueError("connections_max must be at least 1")
        self._connections_max = connections_max
        self._devices: dict[User, dict[str, S]] = {}
        self._in_chat: dict[str, _Present[S]] = {}
        self._chats: dict[S, list[str]] = {}

    def __len__(self) -> int:
        return len(self._chats)

    @property
    def users(self) -> Collection[User]:
        return self._devices.keys()

    @property
    def chats(self) -> Collection[str]:
        """Every chat that somebody here is in."""
        return self._in_chat.keys()

    def of_user(self, user: User) -> tuple[S, ...]:
        """The user's sessions, oldest first."""
        return tuple(self._devices.get(user, {}).values())

    def in_chat(self, chat_id: str) -> tuple[S, ...]:
        """The sessions that get this chat's messages."""
        present = self._in_chat.get(chat_id)
        return () if present is None else present.sessions

    def missing(self, chat_id: str, users: Set[User]) -> Set[User]:
        """Those of ``users`` without a session in the chat, though they may have one. Asked with the same set again,
        it need not look."""
        present = self._in_chat.get(chat_id)
        if present is None or present.covered is users:
            return users if present is None else NOBODY
        missing = users - {session.user for session in present.sessions}
        if missing:
            missing = {user for user in missing if self._may_join(user, chat_id)}
        if not missing:
            present.covered = users
        return missing

    def add(self, session: S) -> list[S]:
        """A session has arrived, in no chat yet; returns those it displaces, which are gone from here: close them."""
        devices = self._devices.setdefault(session.user, {})
        displaced = []
        if (old := devices.pop(session.device_id, None)) is not None:
            displaced.append(old)
        while len(devices) >= self._connections_max:
            displaced.append(devices.pop(next(iter(devices))))
        devices[session.device_id] = session
        self._chats[session] = []
        for old in displaced:
            self._leave_all(old)
        return displaced

    def established(self, session: S) -> None:
        """The session knows its chats: it gets their messages from now on."""
        for chat_id in session.chats:
            self._join(chat_id, session)

    def remove(self, session: S) -> None:
        """The session is gone. Again, or after it was displaced, is harmless."""
        self._leave_all(session)
        devices = self._devices.get(session.user, {})
        if devices.get(session.device_id) is session:
            del devices[session.device_id]
            if not devices:
                del self._devices[session.user]

    def joined(self, user: User, chat_id: str) -> None:
        """The user is in the chat from now on. Again is harmless."""
        for session in self.of_user(user):
            if session.reads(chat_id):
                self._join(chat_id, session)

    def _may_join(self, user: User, chat_id: str) -> bool:
        """Not where every session of the user has a credential that is not good for the chat."""
        sessions = self.of_user(user)
        return not sessions or any(session.reads(chat_id) for session in sessions)

    def left(self, user: User, chat_id: str) -> None:
        """The user is no longer in the chat. Again is harmless."""
        for session in self.of_user(user):
            if chat_id in self._chats[session]:
                self._chats[session].remove(chat_id)
                self._leave(chat_id, session)

    def _join(self, chat_id: str, session: S) -> None:
        chats = self._chats.get(session)
        if chats is None:
            return
        if (present := self._in_chat.get(chat_id)) is None:
            present = self._in_chat[chat_id] = _Present()
        here = present.changing
        if session not in here:
            here[session] = None
            chats.append(chat_id)

    def _leave_all(self, session: S) -> None:
        for chat_id in self._chats.pop(session, ()):
            self._leave(chat_id, session)

    def _leave(self, chat_id: str, session: S) -> None:
        present = self._in_chat[chat_id]
        present.covered = NOBODY
        del present.changing[session]
        if not present.changing:
            del self._in_chat[chat_id]
