"""The seam of the bus, and the closed set of notifications.

At most once, in no order, to every other node: a notification may be lost, repeated or
late, so nobody may need one. No message passes here. A new field needs a default, and a
kind that a node does not know is counted and skipped: two versions run side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from msgspec import Struct

from holdfast.message import User

Status = Literal["online", "offline"]


class TypingChanged(Struct, frozen=True, tag="typing"):
    """For the sessions in the chat."""

    about: User
    chat_id: str
    active: bool


class PresenceChanged(Struct, frozen=True, tag="presence"):
    """For the sessions in these chats. ``at`` is the registry's time in microseconds:
    an older change that comes later is ignored.
    """

    about: User
    status: Status
    at: int
    chat_ids: tuple[str, ...]


class ReceiptMoved(Struct, frozen=True, tag="receipt"):
    """For the sessions of the sender ``to`` that are in the chat."""

    about: User
    to: User
    chat_id: str
    delivered: int
    read: int


class DeviceDisplaced(Struct, frozen=True, tag="displaced"):
    """For one gateway: its connections whose devices have connected elsewhere."""

    gateway: str
    connection_ids: tuple[str, ...]


class RevocationsChanged(Struct, frozen=True, tag="revocations"):
    """A wake-up: read the revocations now instead of with the next poll."""


class KeysChanged(Struct, frozen=True, tag="keys"):
    """A wake-up: read the API keys now instead of with the next poll."""


IN_DOUBT_MAX = 50
"""Chats in one notification: a payload of PostgreSQL's is below 8,000 bytes."""


class ChatsInDoubt(Struct, frozen=True, tag="doubt"):
    """Compare the sessions of these chats with the store; of all chats if empty."""

    chat_ids: tuple[str, ...]


EphemeralNotification = TypingChanged | PresenceChanged | ReceiptMoved
Notification = (
    EphemeralNotification | DeviceDisplaced | RevocationsChanged | KeysChanged | ChatsInDoubt
)


class Bus(Protocol):
    """Adapters: memory, Redis, PostgreSQL."""

    def publish(self, notification: Notification) -> None:
        """Send to the other nodes, not to this one. Never waits and never fails.

        What is published within ``batches.GATHER_SECONDS`` goes out together, equal
        notifications once. What finds no room, or no way, is dropped and counted.
        """
        ...

    def subscribe(self, on_notification: Callable[[Notification], None]) -> None:
        """Call this with every notification of other nodes; it must not wait."""
        ...

    async def run(self) -> None:
        """Send and receive until cancelled. Connects again after a failure."""
        ...
