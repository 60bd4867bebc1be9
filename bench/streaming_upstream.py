"""A model's server for the benchmarks: OpenAI's chat completions, streamed at a given
pace, as cheaply as possible.

`python bench/streaming_upstream.py` serves on a free loopback port. The text of a
request says how it is answered: ``tokens=40 gap=0.05 first=0.02 id=7``. Each token is
the nanosecond at which it was written, so a client knows how long it was under way.
``gap=0``: as fast as it is read. Orders: `closed`: when each client left before its
end, by id; `used`.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import uvloop

from children import obey, used

SCRIPT = re.compile(rb"tokens=(\d+) gap=([\d.]+) first=([\d.]+) id=(\d+)")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
OPEN = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"scripted","system_fingerprint":"fp_1","choices":[{"index":0,"delta":'
)
FIRST = OPEN + b'{"role":"assistant","content":"@%d@ "},"finish_reason":null}]}\n\n'
TOKEN = OPEN + b'{"content":"@%d@ "},"finish_reason":null}]}\n\n'
FINISH = OPEN + b'{},"finish_reason":"stop"}]}\n\n'
USAGE = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"scripted","choices":[],"usage":{"prompt_tokens":10,"completion_tokens":%d,'
    b'"total_tokens":%d}}\n\ndata: [DONE]\n\n'
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class ModelConnection(asyncio.Protocol):
    """One request and streamed answer after the other."""

    def __init__(self, closed: dict[int, float]) -> None:
        self._closed = closed
        self._data = b""
        self._is_writable = True
        self._left = self._tokens = 0
        self._gap = 0.0
        self._id = 0
        self._is_first = self._is_last = False
        self._is_late = False
        """Whether a token is due that could not be written."""
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if found and head.startswith(b"GET"):  # a router asks whether it is healthy
            self._data = b""
            self._transport.write(HEALTHY)
            return
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if self._left or not found or length is None or len(body) < int(length[1]):
            return
        self._data, self._is_last = b"", b"connection: close" in head.lower()
        script = SCRIPT.search(body)
        assert script is not None, body[:500]
        self._tokens = self._left = int(script[1])
        self._gap, first, self._id = float(script[2]), float(script[3]), int(script[4])
        self._is_first = True
        self._transport.write(HEAD)
        self._due = self._loop.time() + first
        self._timer = self._loop.call_at(self._due, self._write)

    def _write(self) -> None:
        if not self._is_writable:
            self._is_late = True
            return
        text = FIRST if self._is_first else TOKEN
        self._is_first = False
        self._transport.write(chunk(text % time.monotonic_ns()))
        self._left -= 1
        if not self._left:
            end = FINISH + USAGE % (self._tokens, self._tokens + 10)
            self._transport.write(chunk(end) + b"0\r\n\r\n")
            if self._is_last:
                self._transport.close()
        elif self._gap:
            self._due += self._gap
            self._timer = self._loop.call_at(self._due, self._write)
        else:
            self._timer = self._loop.call_soon(self._write)

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        if self._is_late:
            self._is_late = False
            self._write()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_writable = False
        if self._timer is not None:
            self._timer.cancel()
        if self._left:
            self._closed[self._id] = time.monotonic()


async def serve() -> None:
    closed: dict[int, float] = {}

    async def report_closed(order: dict[str, Any]) -> dict[str, Any]:
        return {"closed": closed}

    server = await asyncio.get_running_loop().create_server(
        lambda: ModelConnection(closed), "127.0.0.1", 0, backlog=4096
    )
    port = server.sockets[0].getsockname()[1]
    await obey({"used": used, "closed": report_closed}, {"url": f"http://127.0.0.1:{port}/v1"})


if __name__ == "__main__":
    uvloop.run(serve())
