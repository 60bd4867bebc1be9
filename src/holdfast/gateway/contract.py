"""What a connection needs: a socket, its gateway, and the node's parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.access.principal import Principal
from holdfast.access.proofs import CursorProofs
from holdfast.clock import Clock, Ids
from holdfast.errors import HoldfastError
from holdfast.fanout.settings import RetrySettings
from holdfast.gateway.settings import GatewaySettings
from holdfast.history.history import ChatHistory
from holdfast.ingest.contract import Sends
from holdfast.ingest.watermarks import Watermarks
from holdfast.message import Cursor, User
from holdfast.session.heartbeat import Transmission
from holdfast.session.settings import SessionSettings

if TYPE_CHECKING:
    from holdfast.gateway.connection import Connection


class Socket(Protocol):
    """A WebSocket, as a connection uses it."""

    @property
    def write(self) -> Callable[[bytes], None]:
        """Write whole frames; may call ``Connection.writing_paused`` at once."""
        ...

    def close(self, code: int, reason: str) -> None:
        """Send a close frame after what was written; close when the client does.

        Nothing may be written after it. Input is read and dropped for a while: closing
        a socket with unread input resets it, and the client loses the last frames.
        """
        ...

    def abort(self) -> None:
        """Close at once and drop what waits."""
        ...

    @property
    def unsent(self) -> int:
        """Written bytes that have not left the process."""
        ...

    def transmission(self) -> Transmission:
        """How many of the written bytes the peer's machine has taken."""
        ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class ConnectionHost(Protocol):
    """What a connection asks of its gateway."""

    def on_opened(self, connection: Connection, now: float) -> None:
        """Put the new session on the roster, before its memberships are read."""
        ...

    async def read_memberships(self, connection: Connection) -> Mapping[str, Cursor]:
        """The user's chats. Establish the session in the same step, without waiting:
        a change of a membership after this counts for the session itself.
        """
        ...

    def on_established(self, connection: Connection) -> None:
        """The session knows its chats: deliver their messages to it."""
        ...

    def on_lost(self, connection: Connection) -> None:
        """The connection has ended."""
        ...

    def wake(self, connection: Connection) -> None:
        """Call its ``flush`` before this turn of the loop ends."""
        ...

    def typing(self, user: User, chat_id: str, active: bool) -> None: ...

    def spread_ms(self) -> int:
        """A random delay that spreads clients that reconnect together."""
        ...

    def log(self, connection: Connection, event: str, **facts: str) -> None:
        """Log an event with this connection's id and user."""
        ...

    def start(self, connection: Connection, work: Coroutine[Any, Any, None]) -> None:
        """Run a task for this connection; the gateway cancels it when it stops.

        A defect in the task aborts the connection: nothing else would answer the
        request.
        """
        ...


@dataclass(frozen=True, slots=True)
class GatewayDeps:
    """The parts of the node that connections use."""

    settings: GatewaySettings
    clock: Clock
    ids: Ids
    sends: Sends
    history: ChatHistory
    watermarks: Watermarks
    proofs: CursorProofs
    verify: Callable[[str], Principal]
    rng: random.Random
    """Spreads the heartbeats, rotations and reconnects of many clients."""
    refusal: Callable[[Principal, str], HoldfastError | None] = lambda principal, device_id: None
    """Why this principal and device are cut off (revoked); None if they are not."""
    sends_failing_seconds: Callable[[], float] = lambda: 0.0
    """How long every send has been refused because the store is unavailable."""
    retry: RetrySettings = field(default_factory=RetrySettings)
    session_settings: SessionSettings = field(init=False)
    """One value that all sessions share."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "session_settings", self.settings.session)
