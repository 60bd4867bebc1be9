"""What the machine asks its shell to do: a small closed union. (Pure.)"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.client.cursors import ChatCopy
from holdfast.client.events import Sent
from holdfast.client.outbox import OutboxEntry
from holdfast.errors import HoldfastError
from holdfast.wire.frames import AnyClientFrame, ConnectionClosing, ConnectionEstablished, CursorClaim


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
