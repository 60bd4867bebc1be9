"""The one port: a listening socket, and HTTP on it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn
from urllib.parse import unquote

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, parse_url
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from holdfast import telemetry
from holdfast.access.network import HttpCounts
from holdfast.bounds import KIB
from holdfast.errors import BadSetting, InvalidMessage, MessageTooLarge, RateLimited, Unavailable
from holdfast.gateway.handshake import RETURN_SECONDS, Refusal, UpgradeRequest, refused_with
from holdfast.gateway.transport.port import Port
from holdfast.gateway.unread_answers import UnreadAnswers

_App = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""

HTTP_STOP_SECONDS = 5
"""How long requests that are open after the drain may still take."""
HEAD_SECONDS = 5.0
"""How long a client may take until its next request begins, and then for its head. It counts from when everything
before it is answered and has left: until then it may not even have been read."""
HEAD_BYTES_MAX = 32 * KIB
"""Of the head of a request, its trailers included; a token has at most 4 KiB. More: 431, and it is not parsed on."""
PARSED_BYTES = 16 * KIB
"""Are parsed at a time, so that the bound above holds for one large segment as for many small ones."""
HEADERS_MAX = 100
"""Header fields of a request: a browser behind two proxies sends about 40. More: 431."""
URL_BYTES_MAX = 8 * KIB
"""Path and query: the longest reason of a deletion, percent-encoded, fits. More: 414, before anything is decoded."""
PATH_BYTES_MAX = 2 * KIB
"""Of the path alone: the longest ids, percent-encoded, fit four times. More: 414."""
PIPELINED_MAX = 64
"""Requests of a connection that wait for the answers to those before them. The next: 400, when they are answered."""
REST_SECONDS = 2.0
"""How long the rest of a request is read that was answered without it: time for the answer to be read, no more."""
TAKEN_SECONDS = 30.0
"""How long an answer may stand in the buffers without being taken."""
BACKLOG = 2048
HEADER_OVERHEAD_BYTES = 4
"""The colon, the space and the end of the line."""


@dataclass(frozen=True, slots=True)
class HttpDeps:
    """What the port needs of the rest of the node."""

    port: Port
    counts: HttpCounts
    unread: UnreadAnswers
    count_stranger: Callable[[str], None]
    """Counts a request without a credential against its address; RateLimited if it is one too many."""
    legacy_rate_limit_headers: bool


class _Refused(Exception):
    """Stops the parser."""


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, taken before anything else so that a busy port changes nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise BadSetting(
                f"cannot listen on {host}:{port} ({error.strerror}): stop what uses it, or choose another with --port"
            ) from None
        listening.listen(BACKLOG)
        yield listening
    finally:
        listening.close()


class _Requests(HttpToolsProtocol):
    """uvicorn's protocol with bounds, and with our words in every refusal.

    uvicorn alone takes any number of connections and a head of any size, waits for ever for a head, for the rest of a
    body that was refused and for a client that does not read its answer, hands over any upgrade, loses what came behind
    one, lets a refusal overtake the answers to earlier requests, and drops those when the client ends its side.

    One timer at a time bounds what the client is to do next (``_await_client``).
    """

    _head_bytes = 0
    _head_is_whole = False
    """What else comes as a header of this request is a trailer, which nobody here asks for."""
    _body_is_whole = True
    _unparsed_bytes = 0
    """Received since the parser last handed something over: one element that does not end."""
    _ignoring = False
    """Nothing more is parsed: it was refused, the client has ended, or the connection is no longer HTTP."""
    _refusal: Refusal | None = None
    """It is written when everything before it is answered."""
    _refused = False
    """And it has been."""
    _ended = False
    """The client has ended its side of the connection."""
    _answering: RequestResponseCycle | None = None
    _timer: asyncio.TimerHandle | None = None
    _counted_as: str | None = None
    """The address under which the connection is counted, as long as it is."""

    def __init__(self, deps: HttpDeps, log: telemetry.ThrottledLog, **given: Any) -> None:
        super().__init__(**given)
        self._deps = deps
        self._log = log
        self._peer = ""
        self._path = self._query = ""
        """Of a request for an upgrade."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # whatever the kernel does not take at once is counted
        self._peer = self.client[0] if self.client else ""
        counts = self._deps.counts
        if full := counts.open(self._peer):
            telemetry.http_connection_refused()
            self._refuse(refused_with(Unavailable(full, retry_after_seconds=RETURN_SECONDS)))
            return
        self._counted_as = self._peer
        telemetry.http_connections(counts.total)
        self._await_client()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deps.unread.discard(self.transport)
        if self._answering is not None:  # uvicorn tells the request that came last, not the one that is answered
            self._answering.disconnected = True
        self._cancel_timer()
        self._leave()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn never goes on
        """The client sends nothing more: what it asked is answered, and what it did not finish is not."""
        self._ended = self._ignoring = True
        self._drop_unfinished()
        return self._unanswered

    def data_received(self, data: bytes) -> None:
        if self._ignoring:
            return
        for at in range(0, len(data), PARSED_BYTES):
            if not self._parse(data[at : at + PARSED_BYTES], len(data) - at):
                return

    def _parse(self, data: bytes, unread: int) -> bool:
        """Whether to parse on. ``unread``: how many bytes have come, these included."""
        self._unparsed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except HttpParserError:  # also what a callback raises, which has refused already
            self._refuse_request(refused_with(InvalidMessage("the request is not valid HTTP/1.1")))
        except HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self._upgrade(behind_it=unread - upgrade.args[0])
            elif self.cycle is not None:
                self.cycle.keep_alive = False  # it is answered as if it had not asked; the parser takes no more
                self._ignoring = True
        else:
            if self._unparsed_bytes > HEAD_BYTES_MAX:
                self._refuse_request(_too_large(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head", HEAD_BYTES_MAX))
        return not self._ignoring

    def _refuse(self, refusal: Refusal) -> None:
        """Answer what came before, then this, and parse nothing more. A request whose body breaks off is not run on."""
        if self._refusal is not None:
            return
        self._refusal, self._ignoring = refusal, True
        self._drop_unfinished()
        if not self._unanswered:
            self._write_refusal(refusal)

    def _refuse_request(self, refusal: Refusal) -> None:
        if self._refusal is None:
            self._refuse(self._counted(refusal))

    def _refuse_handshake(self, error: InvalidMessage) -> None:
        refusal = self._counted(refused_with(error))
        telemetry.handshake_refused(refusal.status)
        self._refuse(refusal)

    def _counted(self, refusal: Refusal) -> Refusal:
        """The refusal of a request that nobody else counts, or that of one too many."""
        try:
            self._deps.count_stranger(self._peer)
        except RateLimited as error:
            return refused_with(error, legacy=self._deps.legacy_rate_limit_headers)
        return refusal

    def _drop_unfinished(self) -> None:
        """The last request, if its body is not whole and will never be."""
        broken = self.cycle
        if broken is not None and broken.more_body and not broken.response_complete:
            broken.disconnected = True
            broken.waiting_for_100_continue = False  # else its task writes one behind the refusal
            broken.message_event.set()
            if self.pipeline and self.pipeline[0][0] is broken:
                self.pipeline.popleft()

    @property
    def _unanswered(self) -> bool:
        running = self._answering
        return bool(self.pipeline) or (
            running is not None and not running.response_complete and not running.disconnected
        )

    def _write_refusal(self, refusal: Refusal) -> None:
        """Read no more than it takes for the answer to be read: closed at once, with bytes of the client on their way,
        the kernel would send a reset, which may overtake it."""
        if self.transport.is_closing():
            return
        self._refused = True
        self._log.info("node.request_refused", address=self._peer, status=refusal.status, answer=refusal.body.decode())
        self.transport.write(_response(refusal))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._await_client()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED_MAX:
            text = f"at most {PIPELINED_MAX} requests of a connection may wait behind the one that is answered"
            self._refuse_rest(refused_with(InvalidMessage(text)))
        super().on_message_begin()
        self._head_bytes, self._head_is_whole = 0, False
        self._await_client()

    def on_url(self, url: bytes) -> None:
        self.url += url
        self._unparsed_bytes = 0
        if len(self.url) > PATH_BYTES_MAX:
            self._check_url()

    def _check_url(self) -> None:
        if len(self.url) > URL_BYTES_MAX:
            self._refuse_rest(_too_large(HTTPStatus.REQUEST_URI_TOO_LONG, "the path and query", URL_BYTES_MAX))
        if len(self.url.partition(b"?")[0]) > PATH_BYTES_MAX:
            self._refuse_rest(_too_large(HTTPStatus.REQUEST_URI_TOO_LONG, "the path", PATH_BYTES_MAX))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_is_whole:
            super().on_header(name, value)
        self._unparsed_bytes = 0
        self._head_bytes += len(name) + len(value) + HEADER_OVERHEAD_BYTES
        if len(self.headers) > HEADERS_MAX:
            fields = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._refuse_rest(_too_large(fields, "the head", HEADERS_MAX, "header fields"))
        if self._head_bytes + len(self.url) > HEAD_BYTES_MAX:
            self._refuse_rest(_too_large(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head", HEAD_BYTES_MAX))

    def _refuse_rest(self, refusal: Refusal) -> NoReturn:
        """From within the parser, which stops at an exception."""
        self._refuse_request(refusal)
        raise _Refused

    def on_headers_complete(self) -> None:
        self._head_is_whole, self._body_is_whole = True, False
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1:
            self._refuse_rest(refused_with(InvalidMessage("the header Host was given more than once", field="Host")))
        if not hosts and self.parser.get_http_version() == "1.1":
            self._refuse_rest(refused_with(InvalidMessage("a request must have a Host header", field="Host")))
        if self.parser.should_upgrade() and self._should_upgrade():
            self._check_upgrade()
        super().on_headers_complete()
        self._await_client()

    def _check_upgrade(self) -> None:
        """What only HTTP knows of a handshake; everything else is judged where it is answered."""
        url, sent = parse_url(self.url), dict(self.headers)
        self._path, self._query = unquote(url.path.decode("ascii")), (url.query or b"").decode("latin-1")
        error = None
        if b"transfer-encoding" in sent or sent.get(b"content-length", b"0") != b"0":
            error = InvalidMessage("a request that opens a WebSocket has no body")
        elif self._unanswered or self.flow.write_paused:
            error = InvalidMessage("a handshake must wait until the requests before it are answered and read")
        if error is not None:
            self._refuse_handshake(error)
            raise _Refused

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, partial(_answer_at_once, app, cycle))

    def on_response_complete(self) -> None:
        """As uvicorn has it, with our timers."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal is not None:
            self._write_refusal(self._refusal)
        elif self._ended:
            self.transport.close()
        else:
            self._await_client()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._body_is_whole = True
        self._await_client()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deps.unread.add(self.transport)
        self._set_timer(TAKEN_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deps.unread.discard(self.transport)
        self._await_client()

    def _should_upgrade_to_ws(self) -> bool:
        return True

    def _upgrade(self, behind_it: int) -> None:
        """``behind_it``: bytes that have come behind the head, which uvicorn would drop."""
        if self._refusal is not None:
            return
        if behind_it:
            self._refuse_handshake(InvalidMessage("a frame must wait for the answer to the handshake"))
            return
        scope = self.scope
        request = UpgradeRequest(scope["method"], scope["http_version"], self._path, self._query, self.headers)
        refusal = self._deps.port.upgrade(request, self.transport)
        if refusal is not None:
            self._refuse(refusal)
            return
        self._ignoring = True
        self._cancel_timer()
        self._leave()
        self.connections.discard(self)
        self.parser = None  # type: ignore[assignment]  # as where a connection is lost: they hold each other

    def _leave(self) -> None:
        if self._counted_as is not None:
            self._deps.counts.close(self._counted_as)
            telemetry.http_connections(self._deps.counts.total)
            self._counted_as = None

    def _await_client(self) -> None:
        """Give it time for what it is to do next. While it waits for an answer there is none, and while answers are not
        taken another time runs."""
        if self.flow.write_paused:
            return
        self._cancel_timer()
        if self._refused or not (self._body_is_whole or self._unanswered):
            self._set_timer(REST_SECONDS, self.transport.close)
        elif not self._unanswered:
            self._set_timer(HEAD_SECONDS, self.transport.close)

    def _set_timer(self, seconds: float, otherwise: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, otherwise)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _answer_at_once(app: _App, cycle: RequestResponseCycle, scope: Any, receive: Any, _send: Any) -> None:
    await app(scope, receive, _OneWrite(cycle).send)


class _OneWrite:
    """Writes an answer whole: its head waits for its body.

    uvicorn writes them apart, which is a system call more and wakes the reader twice, and matches every header against
    two patterns (measured: see docs/internals/speed.md). An answer in pieces goes its way.
    """

    __slots__ = ("_cycle", "_start")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._start: Any = None

    async def send(self, message: Any) -> None:
        """As ASGI has it."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._start = message
            return
        start, self._start = self._start, None
        if start is None or message.get("more_body") or cycle.flow.write_paused or cycle.disconnected:
            if start is not None:
                await cycle.send(start)
            await cycle.send(message)
            return
        self._write(start["status"], [*cycle.default_headers, *start["headers"]], message["body"])

    def _write(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        cycle = self._cycle
        lines = [b"%b: %b\r\n" % header for header in headers]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"".join(lines)
        if len(lines) != head.count(b"\n"):
            raise ValueError("a header of the answer holds a line break")
        cycle.response_started = cycle.response_complete = True
        shown = b"" if cycle.scope["method"] == "HEAD" else body
        cycle.transport.write(b"".join((STATUS_LINE[status], head, b"\r\n", shown)))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


def _too_large(status: HTTPStatus, what: str, most: int, unit: str = "bytes") -> Refusal:
    error = MessageTooLarge(f"{what} of a request may have at most {most} {unit}", limit=most)
    return replace(refused_with(error), status=status)


def _response(refusal: Refusal) -> bytes:
    """The last answer of a connection."""
    status, body = refusal.status, refusal.body
    headers = {**refusal.headers, "Content-Length": len(body), "Connection": "close"}
    lines = [f"HTTP/1.1 {status} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


class _Server(uvicorn.Server):
    """uvicorn without its signals: the node decides when to stop. ``ready`` is set when it accepts."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@asynccontextmanager
async def serving(app: _App, deps: HttpDeps, listening: socket.socket, broken: asyncio.Event) -> AsyncIterator[None]:
    """Serve HTTP, and WebSockets by upgrade. ``broken`` is set if it ends by itself."""
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=partial(_Requests, deps, telemetry.ThrottledLog()),  # type: ignore[arg-type]  # a factory serves where it wants a class
        ws="none",  # upgrades are the protocol's own
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=HTTP_STOP_SECONDS,
    )
    server = _Server(config)
    ended = asyncio.create_task(server.serve(sockets=[listening]))
    ended.add_done_callback(lambda _: None if server.should_exit else broken.set())
    ready = asyncio.create_task(server.ready.wait())
    try:
        await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
        yield
    finally:
        ready.cancel()
        server.should_exit = True
        await ended
