"""Which sessions are here, by user and by chat. (Pure.)

A user has one session per device and at most ``connections_max``: a device's new socket replaces its old one,
a further device closes the oldest. The sessions of a chat are handed out as a tuple that is replaced when they
change, so a delivery may go through it while sessions come and go.
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


S = TypeVar("S", bound=Attached)
NOBODY: Set[User] = frozenset()


class _Present(Generic[S]):
    """The sessions of a chat, and a set of users of whom it is known that all are among them."""

    __slots__ = ("covered", "sessions")

    def __init__(self, sessions: tuple[S, ...]) -> None:
        self.sessions = sessions
        self.covered = NOBODY


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
        """Those of ``users`` without a session in the chat. Asked with the same set again, it need not look."""
        present = self._in_chat.get(chat_id)
        if present is None or present.covered is users:
            return users if present is None else NOBODY
        missing = users - {session.user for session in present.sessions}
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
            self._join(chat_id, session)

    def left(self, user: User, chat_id: str) -> None:
        """The user is no longer in the chat. Again is harmless."""
        for session in self.of_user(user):
            if chat_id in self._chats[session]:
                self._chats[session].remove(chat_id)
                self._leave(chat_id, session)

    def _join(self, chat_id: str, session: S) -> None:
        here = self.in_chat(chat_id)
        if session in self._chats and session not in here:
            self._chats[session].append(chat_id)
            self._in_chat[chat_id] = _Present((*here, session))

    def _leave_all(self, session: S) -> None:
        for chat_id in self._chats.pop(session, ()):
            self._leave(chat_id, session)

    def _leave(self, chat_id: str, session: S) -> None:
        rest = tuple(other for other in self.in_chat(chat_id) if other is not session)
        if rest:
            self._in_chat[chat_id] = _Present(rest)
        else:
            del self._in_chat[chat_id]
