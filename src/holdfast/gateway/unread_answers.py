"""HTTP responses that wait to be read; they share the WebSockets' memory budget."""

from __future__ import annotations

from asyncio import Transport
from collections.abc import Iterator


class UnreadAnswers:
    """The HTTP transports that are paused because the kernel takes no more."""

    def __init__(self) -> None:
        self._transports: set[Transport] = set()

    def add(self, transport: Transport) -> None:
        self._transports.add(transport)

    def discard(self, transport: Transport) -> None:
        self._transports.discard(transport)

    def sizes(self) -> Iterator[tuple[int, Transport]]:
        """The bytes that wait in each transport."""
        return ((_waiting(transport), transport) for transport in self._transports)


def _waiting(transport: Transport) -> int:
    try:
        return transport.get_write_buffer_size()
    except RuntimeError:  # it has just been aborted
        return 0
