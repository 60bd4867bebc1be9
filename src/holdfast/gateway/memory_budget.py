"""The bytes that wait for clients on this node, and the connections shed for them.

WebSockets and HTTP responses share one budget. Above it the fullest connections are
closed: a disconnected client recovers by itself, a node out of memory does not.
"""

from __future__ import annotations

from asyncio import Transport
from collections.abc import Iterable
from operator import itemgetter

from holdfast import telemetry
from holdfast.gateway.connection import Connection
from holdfast.wire.close_codes import CloseReason


class MemoryBudget:
    """The budget of one node."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._unread: set[Transport] = set()
        """HTTP transports that are paused because the kernel takes no more."""

    def on_response_waits(self, transport: Transport) -> None:
        """An HTTP client does not read its response fast enough."""
        self._unread.add(transport)

    def on_response_read(self, transport: Transport) -> None:
        """It has read on, or has disconnected."""
        self._unread.discard(transport)

    @property
    def unread_responses(self) -> dict[Transport, int]:
        """The bytes that wait in each HTTP transport."""
        return {transport: _waiting(transport) for transport in self._unread}

    def check(self, in_websockets: int, connections: Iterable[Connection]) -> None:
        """Report what waits, ``in_websockets`` and in HTTP; above the budget, shed."""
        waiting = in_websockets + sum(self.unread_responses.values())
        telemetry.outbound_buffers(waiting)
        if waiting > self._bytes_max:
            self._shed(connections)

    def _shed(self, connections: Iterable[Connection]) -> None:
        """Close the fullest connections until the rest fits the budget.

        Bytes of connections that are closing already are about to be freed and do not
        count.
        """
        held: list[tuple[int, Connection | Transport]] = [
            (c.waiting_bytes, c) for c in connections if c.paused and c.closing is None
        ]
        held += [(size, transport) for transport, size in self.unread_responses.items()]
        waiting = sum(size for size, _ in held)
        for size, holder in sorted(held, key=itemgetter(0), reverse=True):
            if waiting <= self._bytes_max:
                return
            waiting -= size
            if isinstance(holder, Connection):
                holder.close(CloseReason.MEMORY_PRESSURE)
            else:
                telemetry.http_connection_shed()
                holder.abort()


def _waiting(transport: Transport) -> int:
    try:
        return transport.get_write_buffer_size()
    except RuntimeError:  # it has just been aborted
        return 0
