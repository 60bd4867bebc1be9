"""The seams of the fanout plane: who is online where, and how to reach a gateway.

Both are best effort. What they miss is found by the sessions' position check and healed by sync, so nothing
here ever queues for later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Protocol

from msgspec import Struct

from holdfast.message import Message, User


class Stretch(Struct, frozen=True):
    """Consecutive messages of one chat of one tenant, for the members that this gateway holds.

    ``users`` are members before the first message, or after it where it is an event that adds them; a gateway
    follows the membership events inside the stretch itself. They are named because a chat's creation leaves no event:
    its first message is how a gateway learns that its users are members.
    """

    tenant: str
    messages: Sequence[Message]
    users: Set[User]


class Envelope(Struct, frozen=True):
    """For one gateway: stretches of chats, in log order."""

    stretches: Sequence[Stretch]


class Registry(Protocol):
    """Which users are connected to which gateways. Adapters: memory."""

    async def announce(self, gateway: str, users: Iterable[User]) -> None:
        """These users have a connection at this gateway; repeated by heartbeat where entries expire."""
        ...

    async def withdraw(self, gateway: str, users: Iterable[User]) -> None:
        """They have none there any more."""
        ...

    async def gateways_of(self, users: Iterable[User]) -> Mapping[str, Set[User]]:
        """For each gateway, which of ``users`` it holds. Unavailable if nobody can say."""
        ...


class Link(Protocol):
    """The way to the gateways. Adapters: local."""

    async def deliver(self, gateway: str, envelope: Envelope) -> None:
        """Hand over an envelope; Unavailable if the gateway cannot be reached now."""
        ...
