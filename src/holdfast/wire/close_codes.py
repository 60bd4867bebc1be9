"""Why the server closes a connection. (Pure.)

The range of a code says what a client does: 4000-4499 reconnect, 4500-4999 do not.
"""

from __future__ import annotations

from enum import Enum


class CloseReason(Enum):
    """A reason with its close code; ``spread``: many clients are closed together, so
    each is told its own delay before it reconnects;
    ``forces_resync``: the server makes a client that could have stayed pull again
    (planned closes, dead connections and what the client must mend apart).
    """

    def __init__(self, code: int, spread: bool, forces_resync: bool, message: str) -> None:
        self.code = code
        self.spread = spread
        self.forces_resync = forces_resync
        self.message = message

    SERVER_SHUTDOWN = (4000, True, False, "the server is shutting down")
    IDLE_TIMEOUT = (4001, False, False, "no answer to the heartbeat")
    SLOW_CONSUMER = (4002, False, True, "the connection does not take what is sent to it")
    MEMORY_PRESSURE = (4003, True, True, "the gateway's buffers are full")
    ROTATION = (4004, False, False, "the connection is old; open a new one")
    OVERLOADED = (4005, False, True, "too many requests were refused as busy")
    STATE_DIVERGED = (4006, False, True, "acknowledgements stay behind what was sent")
    UPSTREAM_FAILURE = (4007, True, True, "messages cannot be stored now")
    TOKEN_EXPIRED = (4008, False, False, "the token has expired; reconnect with a new one")
    RATE_LIMITED = (4009, False, True, "too many frames for too long; come back later")
    DUPLICATE_CONNECTION = (4500, False, False, "replaced by a newer connection")
    PROTOCOL_ERROR = (4501, False, False, "the client does not follow the protocol")
    UNAUTHORIZED = (4502, False, False, "not authorized")

    @property
    def reason(self) -> str:
        return self.name.lower()

    @property
    def reconnect_allowed(self) -> bool:
        return self.code < 4500
