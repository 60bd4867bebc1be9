"""How the server closes a connection so that its last words are read.

Closed while bytes of the client are unread, a socket is reset, and the reset may overtake what was written before it.
So the server ends its own side, reads and drops what still comes, and closes when the client has.
"""

from __future__ import annotations

from asyncio import BufferedProtocol, Transport
from typing import Any

LINGER_SECONDS = 2.0
"""How long a client may take to close after us, then the socket is torn down: a stopped reader never closes."""
LINGER_BYTES_MAX = 1024 * 1024
"""So much is read and dropped meanwhile; more stays in the kernel, unread."""
_dropped = bytearray(64 * 1024)


class _Lingering(BufferedProtocol):
    """In the place of a protocol that is to hear nothing more than its end. All share one buffer: nobody reads it."""

    def __init__(self, transport: Transport, before: Any) -> None:
        self._transport = transport
        self._before = before
        self._left = LINGER_BYTES_MAX

    def get_buffer(self, sizehint: int) -> bytearray:
        return _dropped

    def buffer_updated(self, size: int) -> None:
        self._left -= size
        if self._left <= 0:
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._before.connection_lost(error)


def linger(transport: Transport) -> None:
    """End our side of the connection behind what was written. The caller aborts it after ``LINGER_SECONDS``."""
    if transport.is_closing():
        return
    transport.set_protocol(_Lingering(transport, transport.get_protocol()))
    try:
        transport.write_eof()
    except OSError:  # the client is gone already: asyncio's own transport says so, uvloop's does not
        transport.abort()
        return
    transport.resume_reading()
