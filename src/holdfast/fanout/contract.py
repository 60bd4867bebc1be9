"""How fanout reaches a gateway: best effort, and nothing is queued for later. A session
notices what it missed by its continuity check, and sync repairs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Protocol

from msgspec import Struct

from holdfast.message import Message, User


class MessageRun(Struct, frozen=True):
    """Consecutive messages of one chat, and the users who get them: all members, or in
    an envelope those connected to one gateway.

    ``users`` are the members before the first message, or after it if it is the event
    that adds them. The gateway follows later membership events inside the run by
    itself. The users are listed because creating a chat leaves no event: its first
    message is how a gateway learns that they are members.
    """

    tenant: str
    messages: list[Message]
    users: Set[User]


class Envelope(Struct, frozen=True):
    """Everything one batch holds for one gateway: runs of chats, in log order."""

    runs: Sequence[MessageRun]


class Link(Protocol):
    """The connection to the gateways. Adapters: local."""

    def connect(self, gateway: str, deliver: Callable[[Envelope], None]) -> None:
        """Pass this gateway's envelopes to ``deliver`` from now on."""
        ...

    async def deliver(self, gateway: str, envelope: Envelope) -> None:
        """Hand over an envelope. Unavailable if the gateway cannot be reached now."""
        ...
