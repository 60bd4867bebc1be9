"""A TCP proxy between two programs of this machine that makes the network fail.

``NetworkConditions`` apply to bytes from now on; they may change while connections are
open:

- ``latency_seconds``: every piece arrives later by this time, in order
- ``bytes_per_second``: no faster than this, per direction
- ``slice_bytes``: pieces are cut so small that no reader can rely on whole frames
- ``blackhole``: bytes are swallowed while the connection stays open; they never arrive,
  so the connection is reset at the end (TCP has no holes in its stream)
- ``down``: open connections are reset and new ones are reset at once

``reset()`` breaks the open connections with an RST once. ``one_way`` limits blackhole
to one direction. Bytes in flight are bounded per direction (``_PIECES_IN_FLIGHT_MAX``
pieces of ``_CHUNK_BYTES``), and then by the kernel: a reader that stops also stops the
writer, as on a real network.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

_CHUNK_BYTES = 64 * 1024
_PIECES_IN_FLIGHT_MAX = 64
_CONNECTIONS_MAX = 10_000

Direction = Literal["up", "down"]
"""``up``: from the connecting program to the target."""
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class NetworkConditions:
    """The conditions for bytes from now on."""

    latency_seconds: float = 0.0
    bytes_per_second: float | None = None
    slice_bytes: int | None = None
    blackhole: bool = False
    one_way: Direction | None = None
    down: bool = False

    def __post_init__(self) -> None:
        if self.latency_seconds < 0:
            raise ValueError("latency_seconds must not be negative")
        if self.bytes_per_second is not None and self.bytes_per_second <= 0:
            raise ValueError("bytes_per_second must be greater than 0")
        if self.slice_bytes is not None and self.slice_bytes < 1:
            raise ValueError("slice_bytes must be at least 1")

    def swallows(self, direction: Direction) -> bool:
        return self.blackhole and self.one_way in (None, direction)


class Proxy:
    """``async with Proxy(host, port) as proxy``: listens on ``proxy.port`` of loopback,
    forwards to the target.
    """

    def __init__(self, host: str, port: int, conditions: NetworkConditions | None = None) -> None:
        self._target = (host, port)
        self._conditions = conditions or NetworkConditions()
        self._pairs: dict[_Pair, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self.port = 0
        self.accepted = 0

    @property
    def conditions(self) -> NetworkConditions:
        return self._conditions

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        await asyncio.gather(*self._pairs.values(), return_exceptions=True)
        await self._server.wait_closed()

    def set(self, **changes: Any) -> None:
        """Change the conditions: ``proxy.set(down=True)``."""
        before, self._conditions = self._conditions, replace(self._conditions, **changes)
        if self._conditions.down:
            self.reset()
        if before.blackhole and not self._conditions.blackhole:
            for pair in list(self._pairs):
                if pair.has_hole:
                    pair.reset()

    def reset(self) -> None:
        """Break every open connection with an RST."""
        for pair in list(self._pairs):
            pair.reset()

    @property
    def open(self) -> int:
        return len(self._pairs)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._conditions.down or len(self._pairs) >= _CONNECTIONS_MAX:
            _abort(writer)
            return
        pair = _Pair(self, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._pairs[pair] = task
        try:
            await pair.run(*self._target)
        finally:
            del self._pairs[pair]


class _Pair:
    """One connection through the proxy: two pumps that end together."""

    def __init__(
        self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._near = (reader, writer)
        self._far: asyncio.StreamWriter | None = None
        self._ended = asyncio.Event()
        self._broken = False
        self.has_hole = False

    async def run(self, host: str, port: int) -> None:
        reader, writer = self._near
        try:
            far_reader, self._far = await asyncio.open_connection(host, port)
        except OSError:
            _abort(writer)
            return
        pumping = asyncio.create_task(self._pump((reader, writer), (far_reader, self._far)))
        pumping.add_done_callback(lambda _: self._ended.set())
        try:
            await self._ended.wait()
        finally:
            pumping.cancel()
            await asyncio.wait([pumping])
        for each in (writer, self._far):
            _abort(each) if self._broken else each.close()

    def reset(self) -> None:
        self._broken = True
        self._ended.set()

    async def _pump(self, near: _Streams, far: _Streams) -> None:
        async with asyncio.TaskGroup() as pumps:
            for direction, reader, writer in _directions(near, far):
                flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PIECES_IN_FLIGHT_MAX)
                pumps.create_task(self._take(direction, reader, flight))
                pumps.create_task(self._give(flight, writer))

    async def _take(
        self,
        direction: Direction,
        reader: asyncio.StreamReader,
        flight: asyncio.Queue[tuple[float, bytes]],
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                data = await reader.read(self._proxy.conditions.slice_bytes or _CHUNK_BYTES)
                if self._proxy.conditions.swallows(direction):
                    self.has_hole = True
                    if not data:
                        return
                    continue
                await flight.put((loop.time() + self._proxy.conditions.latency_seconds, data))
                if not data:
                    return
        except OSError:
            self.reset()

    async def _give(
        self, flight: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                due, data = await flight.get()
                rate = self._proxy.conditions.bytes_per_second
                await asyncio.sleep(max(due - loop.time(), len(data) / rate if rate else 0.0))
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()
        except OSError:
            self.reset()


def _directions(
    near: _Streams, far: _Streams
) -> Iterator[tuple[Direction, asyncio.StreamReader, asyncio.StreamWriter]]:
    yield "up", near[0], far[1]
    yield "down", far[0], near[1]


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with an RST: linger for zero seconds."""
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() != -1:  # unless it is closed already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
