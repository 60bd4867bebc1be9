"""The members of chats, kept in memory for what is asked often.

A chat's members are loaded from the store when they are first needed, and forgotten
when the log has an event of their chat. An entry is in the log only after its commit,
so what is loaded after it reflects it. Memory is bounded: the least recently used chats
are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from holdfast.message import Member, User

MAX_MEMBERS = 500_000
"""Members kept, over all chats: about 100 MB."""


class Members:
    """``load`` reads a chat's members from the store, strongly consistent."""

    def __init__(
        self, load: Callable[[str], Awaitable[Sequence[Member]]], max_members: int = MAX_MEMBERS
    ) -> None:
        self._load = load
        self._max_members = max_members
        self._chats: OrderedDict[str, frozenset[User]] = OrderedDict()
        self._loads: dict[str, set[object]] = {}
        self._count = 0

    def known(self, chat_id: str) -> frozenset[User] | None:
        """The chat's members if they are in memory: the usual case, without waiting."""
        if (known := self._chats.get(chat_id)) is not None:
            self._chats.move_to_end(chat_id)
        return known

    async def of(self, tenant: str, chat_id: str) -> frozenset[User]:
        """The members of a chat, loaded if necessary. Raises what the load raises."""
        while (known := self.known(chat_id)) is None:
            ticket = object()
            self._loads.setdefault(chat_id, set()).add(ticket)
            try:
                loaded = frozenset(
                    User(tenant, member.user_id) for member in await self._load(chat_id)
                )
            finally:
                current = self._ended(chat_id, ticket)
            if current and chat_id not in self._chats:
                self._put(chat_id, loaded)
        return known

    def forget(self, chat_id: str) -> None:
        """Forget a chat, also a load in progress, which may be older than the event
        that is the reason; the next use loads it.
        """
        self._loads.pop(chat_id, None)
        old = self._chats.pop(chat_id, None)
        self._count -= 0 if old is None else _weight(old)

    def forget_all(self) -> None:
        """Forget every chat, because events may be lost."""
        self._loads.clear()
        self._chats.clear()
        self._count = 0

    def __len__(self) -> int:
        return len(self._chats)

    def __contains__(self, chat_id: object) -> bool:
        return chat_id in self._chats

    @property
    def count(self) -> int:
        """Members kept, over all chats; an empty chat counts as one."""
        return self._count

    def _ended(self, chat_id: str, ticket: object) -> bool:
        """End a load. Whether the chat was not forgotten since it began."""
        tickets = self._loads.get(chat_id, set())
        current = ticket in tickets
        tickets.discard(ticket)
        if not tickets:
            self._loads.pop(chat_id, None)
        return current

    def _put(self, chat_id: str, members: frozenset[User]) -> None:
        old = self._chats.pop(chat_id, None)
        self._count += _weight(members) - (0 if old is None else _weight(old))
        self._chats[chat_id] = members
        while self._count > self._max_members and len(self._chats) > 1:
            _, forgotten = self._chats.popitem(last=False)
            self._count -= _weight(forgotten)


def _weight(members: frozenset[User]) -> int:
    return max(len(members), 1)
