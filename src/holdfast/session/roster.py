"""Which sessions are on this node, by user and by chat. (Pure.)

A user has one session per device and at most ``connections_max``: a device's new socket
replaces its old one, one device more displaces the oldest. The sessions of a chat are
handed out as an immutable tuple, so a delivery can iterate while sessions come and go.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from holdfast.message import User


class Attached(Protocol):
    """What the roster needs of a session; it compares sessions by identity."""

    @property
    def user(self) -> User: ...

    @property
    def device_id(self) -> str: ...

    @property
    def chats(self) -> Collection[str]: ...


S = TypeVar("S", bound=Attached)


class _Present(Generic[S]):
    """The sessions of a chat.

    A dict takes changes, a tuple serves deliveries, and each is made from the other on
    demand. So a thousand sessions that come together cost one tuple, not a thousand.
    """

    __slots__ = ("_changing", "_settled")

    def __init__(self) -> None:
        self._changing: dict[S, None] | None = None
        self._settled: tuple[S, ...] = ()

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
        """Every chat with a session on this node."""
        return self._in_chat.keys()

    def of_user(self, user: User) -> tuple[S, ...]:
        """The user's sessions, oldest first."""
        return tuple(self._devices.get(user, {}).values())

    def in_chat(self, chat_id: str) -> tuple[S, ...]:
        """The sessions that get this chat's messages."""
        present = self._in_chat.get(chat_id)
        return () if present is None else present.sessions

    def add(self, session: S) -> list[S]:
        """Add a session, in no chat yet; returns the displaced ones: close them."""
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

    def establish(self, session: S) -> None:
        """The session knows its chats: list it under each."""
        for chat_id in session.chats:
            self.join(session, chat_id)

    def remove(self, session: S) -> None:
        """Remove a session; harmless if it was removed or displaced before."""
        self._leave_all(session)
        devices = self._devices.get(session.user, {})
        if devices.get(session.device_id) is session:
            del devices[session.device_id]
            if not devices:
                del self._devices[session.user]

    def join(self, session: S, chat_id: str) -> None:
        """List the session in the chat; harmless if repeated or if it was removed."""
        chats = self._chats.get(session)
        if chats is None:
            return
        if (present := self._in_chat.get(chat_id)) is None:
            present = self._in_chat[chat_id] = _Present()
        here = present.changing
        if session not in here:
            here[session] = None
            chats.append(chat_id)

    def leave(self, session: S, chat_id: str) -> None:
        """Remove the session from the chat; harmless if repeated."""
        if chat_id in self._chats.get(session, ()):
            self._chats[session].remove(chat_id)
            self._leave(chat_id, session)

    def _leave_all(self, session: S) -> None:
        for chat_id in self._chats.pop(session, ()):
            self._leave(chat_id, session)

    def _leave(self, chat_id: str, session: S) -> None:
        present = self._in_chat[chat_id]
        del present.changing[session]
        if not present.changing:
            del self._in_chat[chat_id]
