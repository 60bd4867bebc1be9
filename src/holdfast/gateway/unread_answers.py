"""HTTP answers that wait to be read: they take of the same memory budget as what waits for WebSockets."""

from __future__ import annotations

from asyncio import Transport
from collections.abc import Iterator


class UnreadAnswers:
    """The HTTP connections whose kernel takes no more. A transport is here from when it pauses until it resumes."""

    def __init__(self) -> None:
        self._transports: set[Transport] = set()

    def add(self, transport: Transport) -> None:
        self._transports.add(transport)

    def discard(self, transport: Transport) -> None:
        self._transports.discard(transport)

    def sizes(self) -> Iterator[tuple[int, Transport]]:
        """How many bytes wait, and where."""
        return ((_waiting(transport), transport) for transport in self._transports)


def _waiting(transport: Transport) -> int:
    try:
        return transport.get_write_buffer_size()
    except RuntimeError:  # it was cut off a moment ago
        return 0
