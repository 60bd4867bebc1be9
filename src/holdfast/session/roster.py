"""Which sessions are here, by user and by chat. (Pure.)

A user has one session per device and at most ``connections_max``: a device's new socket replaces its old one,
a further device closes the oldest. Sets of sessions are handed out as tuples and replaced when they change, so a
delivery may go through one while sessions come and go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from holdfast.message import User

S = TypeVar("S")

CONNECTIONS_PER_USER = 5


class Roster(Generic[S]):
    """The sessions of one gateway. ``S`` is whatever stands for one; compared by identity."""

    def __init__(self, connections_max: int = CONNECTIONS_PER_USER) -> None:
        if connections_max < 1:
            raise ValueError("connections_max must be at least 1")
        self._connections_max = connections_max
        self._devices: dict[User, dict[str, S]] = {}
        self._in_chat: dict[str, tuple[S, ...]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

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
        return self._in_chat.get(chat_id, ())

    def add(self, user: User, device_id: str, session: S) -> list[S]:
        """A session has arrived, in no chat yet; returns those it displaces: close them, then ``remove`` them.

        They are no longer of the user, but stay in their chats until they are removed.
        """
        devices = self._devices.setdefault(user, {})
        displaced = []
        if (old := devices.pop(device_id, None)) is not None:
            displaced.append(old)
        while len(devices) >= self._connections_max:
            displaced.append(devices.pop(next(iter(devices))))
        devices[device_id] = session
        self._count += 1 - len(displaced)
        return displaced

    def remove(self, user: User, device_id: str, session: S, chats: Iterable[str]) -> bool:
        """A session is gone, and out of its chats; whether it was the user's last one here."""
        for chat_id in list(chats):
            self.left(chat_id, session)
        devices = self._devices.get(user, {})
        if devices.get(device_id) is not session:
            return False
        del devices[device_id]
        self._count -= 1
        if devices:
            return False
        del self._devices[user]
        return True

    def joined(self, chat_id: str, session: S) -> None:
        """The session gets this chat's messages from now on. Again is harmless."""
        here = self._in_chat.get(chat_id, ())
        if not any(other is session for other in here):
            self._in_chat[chat_id] = (*here, session)

    def left(self, chat_id: str, session: S) -> None:
        """The session gets no more of this chat. Again is harmless."""
        rest = tuple(other for other in self._in_chat.get(chat_id, ()) if other is not session)
        if rest:
            self._in_chat[chat_id] = rest
        else:
            self._in_chat.pop(chat_id, None)
