"""What a connection needs: of the socket below it, the gateway around it and the node behind it."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.access.principal import Principal
from holdfast.clock import Clock, Ids
from holdfast.errors import HoldfastError
from holdfast.gateway.settings import GatewaySettings
from holdfast.history.history import ChatHistory
from holdfast.ingest.watermarks import Watermarks
from holdfast.limits.entry_points import Sends
from holdfast.message import User
from holdfast.session.heartbeat import Transmission
from holdfast.session.settings import SessionSettings

if TYPE_CHECKING:
    from holdfast.gateway.connection import Connection


class Socket(Protocol):
    """The far side of a connection's bytes."""

    @property
    def write(self) -> Callable[[bytes], None]:
        """Writes whole frames; may call ``Connection.writing_paused`` before it returns."""
        ...

    def close(self, code: int, reason: str) -> None:
        """Send a close frame behind what was written, then close as soon as the client does; nothing is written after
        it. What still comes is read and dropped, for a while: closed with input unread, a socket is reset, and the
        client loses what it was sent last."""
        ...

    def abort(self) -> None:
        """Close at once, whatever waits."""
        ...

    @property
    def unsent(self) -> int:
        """Bytes that were written and have not left the process."""
        ...

    def transmission(self) -> Transmission:
        """How far what was written has come, as far as this machine can tell."""
        ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class ConnectionHost(Protocol):
    """The gateway a connection lives in."""

    def opened(self, connection: Connection, now: float) -> None:
        """The session exists: put it on the roster, before its memberships are read."""
        ...

    def established(self, connection: Connection) -> None:
        """The session knows its chats."""
        ...

    def lost(self, connection: Connection) -> None:
        """The connection is over."""
        ...

    def wake(self, connection: Connection) -> None:
        """Flush it before this turn of the loop ends."""
        ...

    def typing(self, user: User, chat_id: str, active: bool) -> None: ...

    def spread_ms(self) -> int:
        """When a client that is sent away with the others should come back."""
        ...

    def log(self, connection: Connection, event: str, **facts: str) -> None:
        """A line about this connection, for operators."""
        ...

    def start(self, connection: Connection, work: Coroutine[Any, Any, None]) -> None:
        """Run something that reads for this connection; the gateway ends it when it stops. A defect in it ends the
        connection, for nobody else would answer the request."""
        ...


@dataclass(frozen=True, slots=True)
class GatewayDeps:
    """What connections need of the rest of the node."""

    limits: GatewaySettings
    clock: Clock
    ids: Ids
    sends: Sends
    history: ChatHistory
    watermarks: Watermarks
    verify: Callable[[str], Principal]
    rng: random.Random
    """Spreads the heartbeats, rotations and returns of those who came together."""
    refusal: Callable[[Principal, str], HoldfastError | None] = lambda principal, device_id: None
    """Why somebody, with this device, is cut off by now; None if not."""
    sends_failing_seconds: Callable[[], float] = lambda: 0.0
    """For how long every send has been refused because the store is away."""
    session_limits: SessionSettings = field(init=False)
    """Those of every session: one value for all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "session_limits", self.limits.session)
