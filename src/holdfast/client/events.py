"""What the client tells its application. (Pure.)

``Message``, ``Typing``, ``Presence`` and ``Receipt`` are the values of the wire, unchanged. Messages and the
``Chat…`` events of one chat come in order; the others tell the newest state and may overtake them.

What the machine asks its shell to do: a small closed union. (Pure.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from holdfast.errors import HoldfastError
from holdfast.message import Message
from holdfast.wire.frames import (
    AnyClientFrame,
    ConnectionClosing,
    ConnectionEstablished,
    CursorClaim,
    Presence,
    Receipt,
    Typing,
)

if TYPE_CHECKING:
    from holdfast.client.chats import ChatCopy
    from holdfast.client.outbox import OutboxEntry

ConnectionState = Literal[
    "reconnecting", "connected", "syncing", "ready", "closing", "disconnected", "backoff", "stopped"
]  # fmt: skip
"""In the order of a connection's life. ``reconnecting``: one is being opened, the first too. ``connected``: the
handshake is answered. ``syncing``: the server has accepted us, and what was missed is being read. ``ready``: all of
that has come. ``closing``: the server says that it will close. ``disconnected``: the connection is gone. ``backoff``:
the next attempt waits for its time. ``stopped``: there is none."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The server has the message on stable storage. ``deduplicated``: it had it already, from an earlier try."""

    client_message_id: str
    message_id: str
    chat_id: str
    sequence: int
    created_at: str
    deduplicated: bool


@dataclass(frozen=True, slots=True)
class ConnectionChanged:
    """The connection is now ``state``; in backoff, the next try is in ``retry_in_seconds``.

    ``ready`` comes behind the messages that were missed; every other state overtakes whatever waits.
    """

    state: ConnectionState
    reason: str = ""
    retry_in_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ChatJoined:
    """A chat this device did not know; its messages follow."""

    chat_id: str


@dataclass(frozen=True, slots=True)
class ChatGone:
    """The user is no longer a member."""

    chat_id: str


@dataclass(frozen=True, slots=True)
class ChatReset:
    """The chat's numbering was repaired: drop every copy of it; all its messages follow again, from the first."""

    chat_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SendRefused:
    """A send nobody waits for (posted, or left over from an earlier run) was refused for good."""

    chat_id: str
    client_message_id: str
    content: str
    error: HoldfastError = field(compare=False)


@dataclass(frozen=True, slots=True)
class Warned:
    """The server says something about the connection as a whole, such as SLOW_CONSUMER."""

    code: str
    message: str


ClientEvent = (
    Message | Typing | Presence | Receipt | ConnectionChanged | ChatJoined | ChatGone | ChatReset | SendRefused | Warned
)


@dataclass(frozen=True, slots=True)
class Write:
    """Write the frame."""

    frame: AnyClientFrame


@dataclass(frozen=True, slots=True)
class Settled:
    """The send is over: take it off the disk and tell whoever waits."""

    entry: OutboxEntry
    outcome: Sent | HoldfastError


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the chat's cursor on disk, then hand this to ``Machine.kept``; None: forget it.

    ``copy`` is whose cursor it is: who left and joined again has another one, in the same epoch.
    """

    chat_id: str
    cursor: CursorClaim | None
    copy: ChatCopy | None = None


@dataclass(frozen=True, slots=True)
class RenewToken:
    """The token expires soon: get a new one and hand it to ``Machine.renewed``."""


@dataclass(frozen=True, slots=True)
class Online:
    """The server has accepted the connection."""

    established: ConnectionEstablished


@dataclass(frozen=True, slots=True)
class Synced:
    """Everything that was missed has been received; said once per connection."""


@dataclass(frozen=True, slots=True)
class Announced:
    """The server says that it will close, and why."""

    closing: ConnectionClosing


@dataclass(frozen=True, slots=True)
class Drop:
    """The connection is of no use any more: cut it, without ceremony."""

    reason: str


MachineAction = Write | Settled | Keep | RenewToken | Online | Synced | Announced | Drop
