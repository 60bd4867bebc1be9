"""Sockets in memory with latency, bounded buffers, cuts and holes, on virtual time.

A ``Wire`` is one connection. The server's side is a ``gateway.contract.Socket``; the
wire splits the written bytes into frames at once, so that the frames are known even if
they never arrive. Order is kept per direction. Bytes that the device has not read count
against the kernel's buffers: above ``HIGH_BYTES`` the wire pauses the server,
as a real transport does.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Protocol

from holdfast.session.heartbeat import Transmission
from holdfast.wire.codec import ServerFrame, decode_server_frame

if TYPE_CHECKING:
    from holdfast.gateway.connection import Connection

HIGH_BYTES = 1024
"""Small, so that a stopped reader has an effect after three messages."""
LOW_BYTES = 256


class Far(Protocol):
    """The device's end of a wire."""

    def arrived(self, wire: Wire, frame: ServerFrame) -> None: ...

    def ended(self, wire: Wire, code: int | None) -> None:
        """The connection is over; ``code`` None: without a closing handshake."""
        ...


class Wire:
    """One connection between a device and the gateway."""

    def __init__(
        self,
        rng: random.Random,
        latency_seconds: float,
        on_written: Callable[[ServerFrame], None],
        server: Context,
    ) -> None:
        """``server`` is the context in which the server's side runs."""
        self._loop = asyncio.get_running_loop()
        self._server_context, self._far_context = server, copy_context()
        self._rng = rng
        self._latency_seconds = latency_seconds
        self._on_written = on_written
        self._connection: Connection | None = None
        self._far: Far | None = None
        self._flying_down: deque[tuple[ServerFrame | None, int]] = deque()
        self._flying_up: deque[bytes | None] = deque()
        self._down: deque[tuple[ServerFrame | None, int]] = deque()
        self._down_bytes = 0
        self._held_up: deque[bytes | None] = deque()
        self._down_at = self._up_at = 0.0
        self._paused = False
        self._reading = True
        self._server_reads = True
        self._code: int | None = None
        self._broken = False
        self.hole = False
        self.over = False
        self.ended = asyncio.Event()
        self.closed_by_server = False

    def attach(self, connection: Connection, far: Far) -> None:
        self._connection = connection
        self._far = far

    # The server's side: gateway.contract.Socket

    def write(self, data: bytes) -> None:
        if self.over:
            return
        for payload in _payloads(data):
            frame = decode_server_frame(payload)
            if frame is not None:
                self._on_written(frame)
            if not self.hole:
                self._down_bytes += len(payload)
                self._later_down(frame, len(payload))
        if self._down_bytes > HIGH_BYTES and not self._paused and self._connection is not None:
            self._paused = True
            self._connection.writing_paused()

    def close(self, code: int, reason: str) -> None:
        if self.over:
            self._give_up()
            return
        self._code = code
        self.closed_by_server = True
        if not self.hole:
            self._later_down(None, 0)

    def abort(self) -> None:
        if self.over:
            self._give_up()
            return
        self.closed_by_server = True
        self.cut()
        if self.hole:
            self._give_up()

    @property
    def unsent(self) -> int:
        return self._down_bytes

    def transmission(self) -> Transmission:
        return Transmission.of_buffer(self._down_bytes if self._paused else 0)

    def pause_reading(self) -> None:
        self._server_reads = False

    def resume_reading(self) -> None:
        self._server_reads = True
        while self._held_up and self._server_reads:
            self._reached_server(self._held_up.popleft())

    # The device's side

    def send(self, data: bytes) -> None:
        if not self.over and not self.hole:
            self._later_up(data)

    def hang_up(self) -> None:
        """The device closes. The server reads what was sent before, then the end."""
        if self.over:
            return
        self._end()
        if not self.hole:
            self._later_up(None)
        self._loop.call_later(self._delay(), self._lost_by_device, context=self._far_context)

    def read_on(self, reading: bool) -> None:
        """A device that stops reading leaves everything in the kernel's buffers."""
        self._reading = reading
        if reading:
            self._drain()

    # Faults

    def cut(self) -> None:
        """Break the connection: each side notices later; bytes in flight are lost. In a
        hole the server learns nothing of it.
        """
        if self.over:
            return
        self._end()
        self._broken = True
        if not self.hole:
            self._give_up()
        self._loop.call_later(self._delay(), self._lost_by_device, context=self._far_context)

    def _end(self) -> None:
        self.over = True
        self.ended.set()

    def _give_up(self) -> None:
        """The server's side ends."""
        self._loop.call_later(self._delay(), self._lost_by_server, context=self._server_context)

    # Arrival

    def _later_down(self, frame: ServerFrame | None, size: int) -> None:
        self._down_at = max(self._down_at, self._loop.time() + self._delay())
        self._flying_down.append((frame, size))
        # Timers of one moment fire in any order: the deque keeps it.
        self._loop.call_at(self._down_at, self._landed_down, context=self._far_context)

    def _later_up(self, data: bytes | None) -> None:
        self._up_at = max(self._up_at, self._loop.time() + self._delay())
        self._flying_up.append(data)
        self._loop.call_at(self._up_at, self._landed_up, context=self._server_context)

    def _landed_down(self) -> None:
        landed = self._flying_down.popleft()
        if not self.over:
            self._down.append(landed)
            self._drain()

    def _landed_up(self) -> None:
        self._reached_server(self._flying_up.popleft())

    def _drain(self) -> None:
        while self._down and self._reading and not self.over and self._far is not None:
            frame, size = self._down.popleft()
            self._down_bytes -= size
            if frame is None:
                self._end()
                self._far.ended(self, self._code)
                self._give_up()
            else:
                self._far.arrived(self, frame)
        if (
            self._paused
            and self._down_bytes < LOW_BYTES
            and not self.over
            and self._connection is not None
        ):
            self._paused = False
            self._loop.call_soon(self._resume_writing, context=self._server_context)

    def _resume_writing(self) -> None:
        if self._connection is not None and not self._paused:
            self._connection.writing_resumed()

    def _reached_server(self, data: bytes | None) -> None:
        if self._broken or self._connection is None:
            return
        if not self._server_reads:
            self._held_up.append(data)
        elif data is None:
            self._lost_by_server()
        else:
            self._connection.frame_received(data)
            self._connection.work_done(1)

    def _lost_by_server(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.connection_lost()

    def _lost_by_device(self) -> None:
        if self._far is not None:
            far, self._far = self._far, None
            far.ended(self, None)

    def _delay(self) -> float:
        return self._latency_seconds * (0.5 + self._rng.random())


def _payloads(data: bytes) -> Iterator[bytes]:
    """The payloads of a run of unmasked text frames."""
    at = 0
    while at < len(data):
        size, start = data[at + 1], at + 2
        if size == 126:
            size, start = int.from_bytes(data[at + 2 : at + 4], "big"), at + 4
        elif size == 127:
            size, start = int.from_bytes(data[at + 2 : at + 10], "big"), at + 10
        yield data[start : start + size]
        at = start + size
