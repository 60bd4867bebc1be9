"""Load: clients that ask for replies over plain sockets and note when each token came,
as cheaply as possible; and the two loads of the design document's table.

Used by tests and by ``bench/streaming.py``.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TOKEN = re.compile(rb"@(\d+)@")
MODEL = "scripted"


@dataclass(frozen=True)
class ReplyServer:
    """Where to ask, and with which credential."""

    url: str
    """Before ``/chat/completions``."""
    key: str
    pid: int = 0
    model: str = MODEL


@dataclass(slots=True)
class Reply:
    """What a client saw of one reply. Times are of the monotonic clock, in seconds."""

    asked: float
    status: int = 0
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    complete: bool = False
    failure: bytes = b""
    lateness: list[tuple[float, float]] = field(default_factory=list)
    """When a token came, and how many seconds after the model had written it."""

    @property
    def succeeded(self) -> bool:
        return self.status == 200 and self.complete and not self.failure


class Client(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._rest = b""
        self.reply = Reply(time.monotonic())
        self.first = asyncio.get_running_loop().create_future()
        """Done with the first token, or with the end."""
        self.end = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now, reply = time.monotonic_ns(), self.reply
        data = self._rest + data
        if not reply.status:
            if b"\r\n\r\n" not in data:
                self._rest = data
                return
            reply.status = int(data[9:12])
        if reply.status != 200 or b'{"error"' in data:
            reply.failure += data[-2000:]
        for match in TOKEN.finditer(data):
            reply.tokens += 1
            reply.lateness.append((now / 1e9, (now - int(match[1])) / 1e9))
        if reply.tokens and not reply.first:
            reply.first = now / 1e9
            self._set(self.first)
        reply.complete = reply.complete or b"data: [DONE]" in data
        # A token or the end may be cut in two: keep the part behind the last event.
        self._rest = data[data.rfind(b"\n\n") + 2 :][-400:] if b"\n\n" in data else data[-400:]
        if reply.complete or data.endswith(b"0\r\n\r\n"):
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self.reply.ended:
            self.reply.ended = time.monotonic()
            self._set(self.first)
            self._set(self.end)
            self.transport.close()

    @staticmethod
    def _set(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)


def request(server: ReplyServer, script: str, user: str = "") -> bytes:
    """A streamed chat completion whose text is the model's script."""
    body: dict[str, Any] = {
        "model": server.model,
        "stream": True,
        "messages": [{"role": "user", "content": script}],
    }
    if user:
        body["user"] = user
    data, address = json.dumps(body).encode(), urlsplit(server.url)
    head = (
        f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Authorization: Bearer {server.key}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def ask(server: ReplyServer, script: str, user: str = "") -> Client:
    """Send a request; await ``.end`` for its end."""
    address = urlsplit(server.url)
    wanted = request(server, script, user)
    _, client = await asyncio.get_running_loop().create_connection(
        lambda: Client(wanted), address.hostname, address.port
    )
    return client


async def whole(server: ReplyServer, script: str, user: str = "") -> Reply:
    client = await ask(server, script, user)
    await client.end
    return client.reply


async def every(
    server: ReplyServer, count: int, script: str, spread_seconds: float = 0
) -> list[Reply]:
    """``count`` replies at once, each of another user; they begin within the spread."""

    async def one(number: int) -> Reply:
        await asyncio.sleep(spread_seconds * number / count)
        return await whole(server, script, f"u{number}")

    replies = await asyncio.gather(*(one(number) for number in range(count)))
    if failed := [reply for reply in replies if not reply.succeeded]:
        raise RuntimeError(f"{len(failed)} of {count} failed: {failed[0].failure[-300:]!r}")
    return list(replies)


class LoadResult(NamedTuple):
    """A column of the document's table. Seconds."""

    requests: int
    refused: int
    """With 429."""
    timed_out: int
    """``queue_timeout``, as status or inside the stream."""
    succeeded: int
    p50: float
    p99: float

    @property
    def success_rate(self) -> float:
        return self.succeeded / self.requests

    @property
    def timeout_rate(self) -> float:
        return self.timed_out / self.requests


def result_of(replies: Sequence[Reply]) -> LoadResult:
    """Times are of those that succeeded, from the request to the end."""
    took = sorted(reply.ended - reply.asked for reply in replies if reply.succeeded)
    return LoadResult(
        len(replies),
        sum(reply.status == 429 for reply in replies),
        sum(b"queue_timeout" in reply.failure for reply in replies),
        len(took),
        took[len(took) // 2] if took else 0.0,
        took[int(len(took) * 0.99)] if took else 0.0,
    )


BURST = 10


async def burst(server: ReplyServer, script: str, user: str = "burst") -> LoadResult:
    """One user who asks 10 times at once and is allowed 3."""
    return result_of(await asyncio.gather(*(whole(server, script, user) for _ in range(BURST))))


async def usual(server: ReplyServer, script: str, seconds: float, prefix: str) -> LoadResult:
    """20 requests a second: 16 of different users and 4 at once of one user, who is
    allowed 3. So one in twenty must wait.
    """

    async def at(moment: float, user: str) -> Reply:
        await asyncio.sleep(moment)
        return await whole(server, script, f"{prefix}-{user}")

    asked = []
    for number in range(int(seconds * 20)):
        moment = number / 20
        if number % 20 < 16:
            asked.append(at(moment, f"single{number}"))
        else:  # the last four of twenty are one user's, together
            asked.append(at(number // 20 + 0.8, f"busy{number // 20}"))
    return result_of(await asyncio.gather(*asked))
