"""The two closed unions that leave the machine: events and actions. (Pure.)

A ``ClientEvent`` goes to the application. ``Message``, ``Typing``, ``Presence`` and
``Receipt`` are the values of the wire, unchanged. Messages and the ``Chat…`` events of
one chat keep their order; the others carry the newest state and may overtake them.

A ``MachineAction`` is for the shell to carry out: write a frame, keep a cursor, get a
token, drop the connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from holdfast.client.chat_copy import ChatCopy
from holdfast.client.outbox import OutboxEntry
from holdfast.errors import HoldfastError
from holdfast.message import Message
from holdfast.wire.frames import (
    AnyClientFrame,
    ConnectionClosing,
    ConnectionEstablished,
    CursorClaim,
    Presence,
    Receipt,
    ReplyTextStatus,
    Typing,
)

ConnectionState = Literal[
    "reconnecting", "connected", "syncing", "ready", "closing", "disconnected", "backoff", "stopped"
]  # fmt: skip
"""In the order of a connection's life:

- ``reconnecting``: a connection is being opened, also the first one
- ``connected``: the handshake has succeeded
- ``syncing``: the server has accepted the client, which reads the messages it missed
- ``ready``: all of these have arrived
- ``closing``: the server announced that it will close
- ``disconnected``: the connection has ended
- ``backoff``: the client waits before the next attempt
- ``stopped``: there will be no further attempt
"""


@dataclass(frozen=True, slots=True)
class Sent:
    """The message is on stable storage; ``deduplicated``: since an earlier try."""

    client_message_id: str
    message_id: str
    chat_id: str
    sequence: int
    created_at: str
    deduplicated: bool


@dataclass(frozen=True, slots=True)
class ConnectionChanged:
    """The connection is now ``state``; ``retry_in_seconds``: of a backoff.

    ``ready`` comes after the missed messages; every other state overtakes waiting
    events.
    """

    state: ConnectionState
    reason: str = ""
    retry_in_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ChatJoined:
    """A chat that is new to this device; its messages follow."""

    chat_id: str


@dataclass(frozen=True, slots=True)
class ChatGone:
    """The user is no longer a member."""

    chat_id: str


@dataclass(frozen=True, slots=True)
class ChatReset:
    """The chat was renumbered: drop its copy; all its messages follow."""

    chat_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SendRefused:
    """A send without a waiting caller (a post, or from an earlier run) was refused."""

    chat_id: str
    client_message_id: str
    content: str
    error: HoldfastError = field(compare=False)


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning about the whole connection, such as SLOW_CONSUMER."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ReplyProgress:
    """An assistant's reply so far: ``text`` is all of it, or its last part.

    ``running``: it grows. ``done``: its message follows, from ``sender_id`` with
    ``reply_id`` as its ``client_message_id``, and replaces the text. ``failed``: there
    will be no message. A lost connection voids the texts; those that still grow come
    again.
    """

    chat_id: str
    reply_id: str
    sender_id: str
    text: str
    state: ReplyTextStatus


ClientEvent = (
    Message
    | Typing
    | Presence
    | Receipt
    | ReplyProgress
    | ConnectionChanged
    | ChatJoined
    | ChatGone
    | ChatReset
    | SendRefused
    | Warned
)


@dataclass(frozen=True, slots=True)
class Write:
    """Write the frame."""

    frame: AnyClientFrame


@dataclass(frozen=True, slots=True)
class Settled:
    """The send is over: remove it from the state file and wake its callers."""

    entry: OutboxEntry
    outcome: Sent | HoldfastError


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the chat's cursor on disk, then call ``Machine.kept``; None: delete it.

    ``copy`` is the copy the cursor belongs to: a user who left and joined again has a
    new copy in the same epoch.
    """

    chat_id: str
    cursor: CursorClaim | None
    copy: ChatCopy | None = None


@dataclass(frozen=True, slots=True)
class RenewToken:
    """The token expires soon: get a new one and pass it to ``Machine.renewed``."""


@dataclass(frozen=True, slots=True)
class Online:
    """The server has accepted the connection."""

    established: ConnectionEstablished


@dataclass(frozen=True, slots=True)
class Synced:
    """All missed messages have been received; once per connection."""


@dataclass(frozen=True, slots=True)
class Announced:
    """The server announced that it will close, and why."""

    closing: ConnectionClosing


@dataclass(frozen=True, slots=True)
class Drop:
    """The connection is useless: cut it without a closing handshake."""

    reason: str


MachineAction = Write | Settled | Keep | RenewToken | Online | Synced | Announced | Drop
