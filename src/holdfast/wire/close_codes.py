"""Why the server closes a connection. (Pure.)

The range of a code says what a client does: 4000-4499 reconnect, 4500-4999 do not.
"""

from __future__ import annotations

from enum import Enum


class CloseReason(Enum):
    """A reason with its close code; ``spread``: many clients reconnect together."""

    def __init__(self, code: int, spread: bool, message: str) -> None:
        self.code = code
        self.spread = spread
        self.message = message

    SERVER_SHUTDOWN = (4000, True, "the server is shutting down")
    IDLE_TIMEOUT = (4001, False, "no answer to the heartbeat")
    SLOW_CONSUMER = (4002, False, "the connection does not take what is sent to it")
    MEMORY_PRESSURE = (4003, True, "the gateway's buffers are full")
    ROTATION = (4004, False, "the connection is old; open a new one")
    OVERLOADED = (4005, False, "too many requests were refused as busy")
    STATE_DIVERGED = (4006, False, "acknowledgements stay behind what was sent")
    UPSTREAM_FAILURE = (4007, True, "messages cannot be stored now")
    TOKEN_EXPIRED = (4008, False, "the token has expired; reconnect with a new one")
    RATE_LIMITED = (4009, False, "too many frames for too long; come back later")
    DUPLICATE_CONNECTION = (4500, False, "replaced by a newer connection")
    PROTOCOL_ERROR = (4501, False, "the client does not follow the protocol")
    UNAUTHORIZED = (4502, False, "not authorized")

    @property
    def reason(self) -> str:
        return self.name.lower()

    @property
    def reconnect_allowed(self) -> bool:
        return self.code < 4500
