"""HTTP/1.1 for long streamed answers of one server: POST a body, read what arrives.

aiohttp takes 400 µs of processor time for a request and 20 µs for a piece of an answer;
half of what a streamed token cost was spent there. This does only what such an answer
needs, and every answer costs bounded bytes and loop time:

- it is parsed ``READ_BYTES`` at a time;
- what is not body (heads, interim answers, chunk sizes, trailers) is bounded by
  ``AROUND_BODY_BYTES_MAX`` and a quarter of the body: a stream of tokens has a chunk
  size for each;
- reading pauses while ``UNREAD_BYTES_MAX`` of the body wait for the caller;
- bytes that belong to no request end the connection.

No redirect is followed, nothing is decompressed, no proxy or cookie is used. The caller
bounds the time. A connection is used again after a complete answer; one that is left
before that is aborted at once, because a close would wait for a peer that does not
read.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.parse import quote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from holdfast.bounds import KIB

READ_BYTES = 16 * KIB
AROUND_BODY_BYTES_MAX = 64 * KIB
INTERIM_ANSWERS_MAX = 10
"""1xx answers before the final one; a normal server sends one or two."""
UNREAD_BYTES_MAX = 128 * KIB
_OTHER_HOST = (62, 64)
"""OpenSSL's codes: the certificate names another host, or another address."""


class HttpFailure(Exception):
    """There is no answer, or no more of it. Its text names no address.

    ``kind``: the server cannot be reached; the connection broke; what it sent is not
    HTTP or beyond the bounds.
    """

    def __init__(self, kind: Literal["unreachable", "lost", "invalid"], text: str) -> None:
        super().__init__(text)
        self.kind = kind


class HttpServer:
    """The server behind one address."""

    def __init__(self, url: str, headers: Mapping[str, str], idle_seconds: float) -> None:
        """``url``: http or https, without credentials, query and fragment.
        ``idle_seconds``: how long an idle connection is used again.
        """
        address = urlsplit(url)
        tls = address.scheme == "https"
        self._address = (address.hostname or "", address.port or (443 if tls else 80))
        self._tls = ssl.create_default_context() if tls else None
        sent = {
            "Host": address.netloc.encode("idna").decode(),
            "Accept-Encoding": "identity",
            **headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        self._head = f"POST {quote(address.path, safe='/%:@')} HTTP/1.1\r\n{lines}".encode()
        self._idle_seconds = idle_seconds
        self._idle: list[_Connection] = []
        """Bounded by the connections in use at once; each leaves after its time."""

    async def post(self, body: bytes) -> HttpAnswer:
        """The answer, when its head has come. Raises HttpFailure; close the answer."""
        connection = self._take_idle() or await self._connect()
        if connection.transport.is_closing():  # lost before this task went on
            raise HttpFailure("lost", "the connection broke")
        answer = connection.begin()
        try:
            head = b"%bContent-Length: %d\r\n\r\n" % (self._head, len(body))
            connection.transport.writelines((head, body))  # in one packet if it is short
            del body
            await answer.head_arrived()
        except BaseException:
            answer.close()
            raise
        return answer

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(loop, self), *self._address, ssl=self._tls
            )
        except OSError as error:
            raise HttpFailure("unreachable", _reason(error)) from None
        return connection

    def keep(self, connection: _Connection) -> asyncio.TimerHandle:
        """Use the connection again, until its time is over."""
        self._idle.append(connection)
        loop = asyncio.get_running_loop()
        return loop.call_later(self._idle_seconds, connection.transport.abort)

    def forget(self, connection: _Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.transport.abort()


def _reason(error: OSError) -> str:
    """Why there is no connection, in words that name no address."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OTHER_HOST:
            return "its certificate is for another host"
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS: {error.reason}"
    return type(error).__name__


class _Connection(asyncio.BufferedProtocol):
    """Belongs to one answer at a time, or is idle."""

    __slots__ = ("_answer", "_idle_timer", "_loop", "_server", "transport")

    _buffer = memoryview(bytearray(READ_BYTES))
    """Of all connections: what arrives is parsed at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: HttpServer) -> None:
        self._loop, self._server = loop, server
        self._answer: HttpAnswer | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def begin(self) -> HttpAnswer:
        """The answer to a request that is about to be written."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._answer = HttpAnswer(self, self._loop)
        return self._answer

    def end(self, *, reusable: bool) -> None:
        """Its answer is complete, or nobody wants the rest of it."""
        self._answer = None
        if reusable and not self.transport.is_closing():
            self._idle_timer = self._server.keep(self)
        else:
            self.transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._answer is None:
            self.transport.abort()
        else:
            self._answer.feed(self._buffer[:nbytes])

    def connection_lost(self, error: Exception | None) -> None:
        self._server.forget(self)
        if self._answer is not None:
            self._answer.on_connection_lost(error)


class HttpAnswer:
    """The answer to one request: its head, then its body as it arrives."""

    __slots__ = (
        "_body_bytes", "_connection", "_failure", "_interim", "_is_final", "_is_paused", "_loop",
        "_parser", "_pieces", "_received", "_reusable", "_sink", "_unread", "_waiter",
        "headers", "is_complete", "status",
    )  # fmt: skip

    def __init__(self, connection: _Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._connection: _Connection | None = connection
        self._loop = loop
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """By their names in lower case; of a repeated one, the last."""
        self._parser = HttpResponseParser(self)
        self._is_final = False
        """Its head has come, and it is not an interim answer's."""
        self.is_complete = False
        """Its last byte has come."""
        self._reusable = self._is_paused = False
        self._failure: Exception | None = None
        self._pieces: list[bytes] = []
        self._sink: Callable[[bytes], bool] | None = None
        self._received = self._body_bytes = self._unread = self._interim = 0
        self._waiter: asyncio.Future[None] | None = None

    # --- the caller

    async def head_arrived(self) -> None:
        while not self._is_final:
            await self._news()

    async def read(self) -> bytes:
        """What has arrived since the last call, waiting for it; empty at the end.

        Raises HttpFailure behind the last byte that came. Cancel-safe.
        """
        while not self._pieces:
            if self.is_complete:
                return b""
            await self._news()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread = 0
        if self._is_paused and self._connection is not None:
            self._is_paused = False
            self._connection.transport.resume_reading()
        return data

    async def pour(self, sink: Callable[[bytes], bool]) -> None:
        """Give the rest of the body to ``sink``, in the turn it arrives in, until its
        end or until ``sink`` returns True. Raises HttpFailure, or what ``sink`` raised.
        """
        if self._pieces and sink(await self.read()):
            return
        self._sink = sink
        while self._sink is not None and not self.is_complete:
            await self._news()
        if self._sink is not None and self._failure is not None:
            raise self._failure

    async def _news(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        await self._waiter

    def close(self) -> None:
        """End the connection at once unless the answer is complete."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end(reusable=self._reusable)

    # --- the connection

    def feed(self, data: memoryview) -> None:
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._fail(HttpFailure("invalid", str(error.__context__ or error)))
        around = self._received - self._body_bytes - self._body_bytes // 4
        if around > AROUND_BODY_BYTES_MAX:
            self._fail(HttpFailure("invalid", "it is beyond its bounds"))
        elif self._unread > UNREAD_BYTES_MAX and not self._is_paused and self._connection:
            self._is_paused = True
            self._connection.transport.pause_reading()

    def on_connection_lost(self, error: Exception | None) -> None:
        self._reusable = False
        if self._ends_with_connection and error is None:
            self.is_complete = True
            self._wake()
        else:
            self._fail(HttpFailure("lost", "the connection broke"))

    @property
    def _ends_with_connection(self) -> bool:
        return self._is_final and not (
            b"content-length" in self.headers or b"transfer-encoding" in self.headers
        )

    def _fail(self, failure: Exception) -> None:
        """What is already complete stays so, but its connection is not used again."""
        self._reusable = False
        if not self.is_complete and self._failure is None:
            self._failure = failure
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the parser

    def on_message_begin(self) -> None:
        if self._is_final:
            raise ValueError("it answers what nobody asked")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_final:  # else it is a trailer
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._is_final = True
            self._wake()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._sink is None:
            self._pieces.append(body)
            self._unread += len(body)
            self._wake()
        elif self._failure is None:
            try:
                if self._sink(body):
                    self._sink = None
                    self._wake()
            except Exception as error:
                self._fail(error)

    def on_message_complete(self) -> None:
        if self._is_final:
            self.is_complete, self._reusable = True, self._parser.should_keep_alive()
            self._wake()
            return
        self.headers.clear()
        self._interim += 1
        if self._interim > INTERIM_ANSWERS_MAX:
            raise ValueError("it has too many interim answers")
