"""A model server on loopback that answers chat completions as it is told, down to the
byte: the other end of ``openai_compatible``.

In a test::

    async with Upstream(stream_of(sse(chunk("hello")), then="reset")) as server:
        … server.base_url …

As a program it sends tokens at a pace, for benchmarks and for tests with several nodes.
It prints its port::

    python tests/support/upstream.py --tokens 100 --rate 20 --first 0.2 --stamp

A request may choose its own pace by the name of its model: ``tokens=50,rate=0``.
``GET /stats`` tells how many answers are open and when clients left unfinished ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
UNBOUNDED_HEAD = HEAD.replace(b"Transfer-Encoding: chunked", b"Connection: close")
"""The body ends with the connection."""
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"[DONE]"

After = Literal["keep", "close", "reset", "hang"]
"""What comes behind an answer: the next request, a clean close, a reset, nothing."""


@dataclass(frozen=True)
class Received:
    """A request as it arrived."""

    head: bytes
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.body)
        return fields


Answer = Callable[[Received, asyncio.StreamWriter], Awaitable[After]]


def event(data: bytes | object) -> bytes:
    """One event, of bytes or of an object as JSON."""
    line = data if isinstance(data, bytes) else json.dumps(data).encode()
    return b"data: " + line + b"\n\n"


def chunk(content: str | None = None, finish: str | None = None, **more: object) -> dict[str, Any]:
    """A ``chat.completion.chunk``."""
    delta = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c1", "object": "chat.completion.chunk", "choices": [choice], **more}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"id": "c1", "object": "chat.completion.chunk", "choices": [], "usage": counts}


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def raw(*pieces: bytes, then: After = "close") -> Answer:
    """These bytes, as they are."""

    async def answer(_request: Received, writer: asyncio.StreamWriter) -> After:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return then

    return answer


def stream_of(*data: bytes, then: After = "keep", head: bytes = HEAD) -> Answer:
    """A chunked body of these pieces; with ``keep`` and ``close`` it has its end."""
    end = LAST_CHUNK if then in ("keep", "close") else b""
    return raw(head, *map(chunked, data), end, then=then)


def completion(*texts: str, prompt_tokens: int = 3) -> Answer:
    """A whole answer: tokens, finish, usage, end."""
    tokens = (event(chunk(text)) for text in texts)
    counts = event(usage(prompt_tokens, len(texts)))
    return stream_of(*tokens, event(chunk(finish="stop")), counts, event(DONE))


def status(code: int, body: bytes = b"", *headers: bytes) -> Answer:
    """An answer without a stream."""
    lines = [b"HTTP/1.1 %d Status" % code, b"Content-Length: %d" % len(body), *headers]
    return raw(b"\r\n".join([*lines, b"", body]), then="keep")


async def silence(_request: Received, _writer: asyncio.StreamWriter) -> After:
    return "hang"


def in_turn(*answers: Answer) -> Answer:
    """Each request the next one; the last one stays."""
    waiting = list(answers)

    async def answer(request: Received, writer: asyncio.StreamWriter) -> After:
        chosen = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return await chosen(request, writer)

    return answer


@dataclass(frozen=True)
class Pace:
    """How tokens come. ``rate``: per second; 0: as fast as they are read. ``first``:
    seconds before the first one. ``stamp``: each token is the monotonic time of its
    sending.
    """

    tokens: int = 100
    rate: float = 20
    first: float = 0
    stamp: bool = False

    def chosen_by(self, model: str) -> Pace:
        """With the values that the name of a model sets."""
        pairs = [pair.split("=", 1) for pair in model.split(",") if "=" in pair]
        types = {"tokens": int, "rate": float, "first": float}
        return replace(self, **{name: types[name](value) for name, value in pairs})


def paced(default: Pace) -> Answer:
    """Tokens at a pace, each in a write of its own unless they are late."""

    async def answer(request: Received, writer: asyncio.StreamWriter) -> After:
        fields = request.fields
        pace = default.chosen_by(fields["model"])
        before, after = json.dumps(chunk("|", model=fields["model"])).split("|")
        writer.write(HEAD)
        clock = asyncio.get_running_loop().time
        begin = clock() + pace.first
        sent = 0
        while sent < pace.tokens:
            if pace.rate:
                await asyncio.sleep(begin + sent / pace.rate - clock())
                due = max(int((clock() - begin) * pace.rate), sent) + 1
            else:
                due = sent + 64
            due = min(due, pace.tokens)
            text = f"{time.monotonic():.6f} " if pace.stamp else " token"
            writer.write(chunked(event(f"{before}{text}{after}".encode())) * (due - sent))
            await writer.drain()
            sent = due
        end = (chunk(finish="stop"), usage(len(request.body) // 4, sent), DONE)
        writer.write(chunked(b"".join(map(event, end))) + LAST_CHUNK)
        return "keep"

    return answer


@dataclass
class Upstream:
    """The server. ``requests``: all that arrived whole. ``open_answers``: now.

    ``left``: monotonic times at which clients closed an answer that was not complete.
    """

    answer: Answer
    port: int = 0
    requests: list[Received] = field(default_factory=list)
    connections: int = 0
    open_answers: int = 0
    left: list[float] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    tls: ssl.SSLContext | None = None

    async def __aenter__(self) -> Self:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(
            self._on_connection, "127.0.0.1", self.port, backlog=4096, ssl=self.tls
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def base_url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}/v1"

    async def until(self, condition: Callable[[Upstream], bool]) -> None:
        """Wait until it holds, at most 10 s; looked at when a request or an end
        arrives.
        """
        async with asyncio.timeout(10):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                begun: bytes | None = b""
                while begun is not None and (request := await _read(reader, begun)):
                    begun = await self._serve(request, reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(
        self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes | None:
        """What has come of the next request; None: there will be none."""
        if request.head.startswith(b"GET /stats"):
            writer.write(self._stats())
            return b""
        self.requests.append(request)
        self.open_answers += 1
        self._changed.set()
        answering = asyncio.ensure_future(self.answer(request, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.left.append(time.monotonic())
                return None
            after = answering.result()
            if after == "hang":
                await leaving
                self.left.append(time.monotonic())
            elif after == "reset":
                reset(writer)
            elif after == "close":
                await writer.drain()
                writer.close()
                await writer.wait_closed()
            if after != "keep":
                return None
            return (leaving.result() or None) if leaving.done() else b""
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            self.open_answers -= 1
            self._changed.set()

    def _stats(self) -> bytes:
        facts = {"open": self.open_answers, "requests": len(self.requests), "left": self.left}
        body = json.dumps(facts).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def _read(reader: asyncio.StreamReader, begun: bytes) -> Received | None:
    try:
        head = begun + await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return Received(head, await reader.readexactly(length))


def reset(writer: asyncio.StreamWriter) -> None:
    """Break the connection: the peer gets RST."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rate", type=float, default=20)
    parser.add_argument("--first", type=float, default=0)
    parser.add_argument("--stamp", action="store_true")
    given = parser.parse_args(arguments)
    pace = Pace(given.tokens, given.rate, given.first, given.stamp)
    async with Upstream(paced(pace), given.port) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main())
