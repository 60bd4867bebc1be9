"""Closes a connection so that the client can read the last frame.

Closing a socket with unread input sends a reset, which may overtake what was written.
So the server ends its own side, reads and drops input, and closes when the client has.

Where the client may still send, it ends its side a little later. A proxy that sees the
end closes both connections, and then its client gets a reset instead of the last frame.
Clients that have read a close frame send no more.
"""

from __future__ import annotations

from asyncio import BufferedProtocol, Transport, get_running_loop
from typing import Any

LINGER_SECONDS = 2.0
"""How long a client may take to close after us. A client that does not read never
closes, so its socket is then aborted."""
END_AFTER_SECONDS = 0.25
"""Within it a client reads the close frame. One that closes first does not wait."""
LINGER_BYTES_MAX = 1024 * 1024
"""Input that is read and dropped meanwhile; more stays unread in the kernel."""
_dropped = bytearray(64 * 1024)


class _Lingering(BufferedProtocol):
    """Replaces a protocol that needs no more input, only ``connection_lost``.

    All instances read into one shared buffer, whose content is never used.
    """

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


def linger(transport: Transport, end_after_seconds: float = END_AFTER_SECONDS) -> None:
    """End our side after what was written; the caller must abort later."""
    if transport.is_closing():
        return
    transport.set_protocol(_Lingering(transport, transport.get_protocol()))
    transport.resume_reading()
    if end_after_seconds:
        get_running_loop().call_later(end_after_seconds, _end, transport)
    else:
        _end(transport)


def _end(transport: Transport) -> None:
    if transport.is_closing():
        return
    try:
        transport.write_eof()
    except OSError:  # the client has disconnected; asyncio raises, uvloop does not
        transport.abort()
