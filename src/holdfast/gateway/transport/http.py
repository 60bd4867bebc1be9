"""HTTP on the one port: uvicorn's protocol with bounds, deadlines and our refusals.

An accepted upgrade leaves HTTP through ``Port``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, parse_url
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from holdfast import telemetry
from holdfast.access.connection_limits import HttpCounts
from holdfast.bounds import KIB
from holdfast.errors import InvalidMessage, RateLimited, Unavailable
from holdfast.gateway.handshake import RETURN_SECONDS, Refusal, UpgradeRequest, refused_with
from holdfast.gateway.memory_budget import MemoryBudget
from holdfast.gateway.transport.lean import NO_WAITER, LeanFlow, LeanPipeline
from holdfast.gateway.transport.port import Port
from holdfast.gateway.transport.responses import OneWrite, refusal_response, too_large

App = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""

HEAD_BYTES_MAX = 32 * KIB
"""Head of a request with its trailers; a token has at most 4 KiB. More: 431."""
PARSED_BYTES = 16 * KIB
"""Parsed at a time, so that the bound above holds for large and small segments."""
HEADERS_MAX = 100
"""Header fields; a browser behind two proxies sends about 40. More: 431."""
URL_BYTES_MAX = 8 * KIB
"""Path and query; the longest reason of a deletion fits. More: 414, not decoded."""
PATH_BYTES_MAX = 2 * KIB
"""The path alone; four of the longest ids fit, percent-encoded. More: 414."""
PIPELINED_MAX = 64
"""Requests that wait behind the one being answered. The next: 400, in its turn."""
HEADER_OVERHEAD_BYTES = 4
"""The colon, the space and the end of the line."""


@dataclass(frozen=True, slots=True)
class HttpTimes:
    """How long the port waits for a client's next step."""

    head_seconds: float = 5.0
    """To begin the next request, and then to complete its head; counted from when all
    earlier responses have left."""
    rest_seconds: float = 2.0
    """To send the rest of a request that was answered early: a socket closed with
    unread input is reset, and the client loses the response."""
    unread_seconds: float = 30.0
    """To read a response."""


HTTP_TIMES = HttpTimes()


@dataclass(frozen=True, slots=True)
class HttpDeps:
    """The parts of the node that the port uses."""

    port: Port
    counts: HttpCounts
    memory_budget: MemoryBudget
    count_anonymous: Callable[[str], None]
    """Counts a request without a credential against its address; raises RateLimited."""
    legacy_rate_limit_headers: bool
    times: HttpTimes


class _Refused(Exception):
    """Stops the parser."""


class HttpRequests(HttpToolsProtocol):
    """uvicorn's protocol with bounds, and with our words in every refusal.

    uvicorn alone takes any number of connections and a head of any size. It waits
    without limit for a head, for the rest of a refused body and for a client that does
    not read. It hands over any upgrade and loses the bytes behind it, lets a refusal
    overtake the responses to earlier requests, and drops those when the client ends its
    side.

    One timer at a time bounds the client's next step (``_await_client``).
    """

    # An object of more than 30 attributes has a dictionary of its own, 1.5 kB for each
    # connection. uvicorn has 28.
    __slots__ = (
        "_answering", "_body_is_whole", "_counted_as", "_deps", "_ended", "_has_stepped",
        "_head_bytes", "_head_is_whole", "_ignoring", "_log", "_on_disconnect", "_path", "_peer",
        "_query", "_refusal", "_refused", "_timer", "_unparsed_bytes", "_unread_seconds_max",
    )  # fmt: skip

    def __init__(self, deps: HttpDeps, log: telemetry.ThrottledLog, **given: Any) -> None:
        super().__init__(**given)
        self.pipeline = LeanPipeline()  # type: ignore[assignment]
        self._deps = deps
        self._log = log
        self._peer = ""
        self._unread_seconds_max = deps.times.unread_seconds
        """How long the client may leave the response unread; a streaming endpoint has
        its own bound, which comes with the response's head."""
        self._path = self._query = ""
        """Only of an upgrade request."""
        self._head_bytes = 0
        self._head_is_whole = False
        """Further headers of this request are trailers, which are ignored."""
        self._body_is_whole = True
        self._unparsed_bytes = 0
        """Received since the last callback of the parser: one element that does not
        end."""
        self._has_stepped = False
        """What is being parsed began a request or completed a head or a body."""
        self._ignoring = False
        """Nothing more is parsed: refused, ended by the client, or no longer HTTP."""
        self._refusal: Refusal | None = None
        """Written when all earlier requests are answered."""
        self._refused = False
        """The refusal has been written."""
        self._ended = False
        """The client has ended its side of the connection."""
        self._answering: RequestResponseCycle | None = None
        self._on_disconnect: Callable[[bool], None] | None = None
        """Of the streamed answer that is being sent: True if the connection is lost,
        False if the client has only ended its side."""
        self._timer: asyncio.TimerHandle | None = None
        self._counted_as: str | None = None
        """The address under which the connection is counted; None when it is not."""

    # uvicorn narrows the type of ``transport`` as well
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # uvicorn's method without the server's address, which nobody reads, and which
        # like the client's costs two system calls and a socket object
        self.connections.add(self)
        self.transport, self.flow = transport, LeanFlow(transport)
        peer = transport.get_extra_info("peername")
        self.client = (peer[0], peer[1]) if peer else None
        self.scheme = "http"
        # so the budget counts what the kernel does not take
        transport.set_write_buffer_limits(high=0)
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
        self._deps.memory_budget.on_response_read(self.transport)
        # uvicorn marks the last request, not the one being answered
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        if self._on_disconnect is not None:
            self._on_disconnect(True)
        self._cancel_timer()
        self._leave()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn never goes on
        """The client ended its side: answer its complete requests."""
        self._ended = self._ignoring = True
        self._drop_unfinished()
        if self._on_disconnect is not None:
            self._on_disconnect(False)
        return self._unanswered

    def data_received(self, data: bytes) -> None:
        if self._ignoring:
            return
        for at in range(0, len(data), PARSED_BYTES):
            if not self._parse(data[at : at + PARSED_BYTES], len(data) - at):
                return

    def _parse(self, data: bytes, unread: int) -> bool:
        """Whether to parse on. ``unread``: bytes not parsed yet, these included."""
        self._unparsed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except HttpParserError:  # or raised by a callback that has refused already
            self._refuse_request(refused_with(InvalidMessage("the request is not valid HTTP/1.1")))
        except HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self._upgrade(behind_it=unread - upgrade.args[0])
            elif self.cycle is not None:
                self.cycle.keep_alive = False  # answered as a plain request; the parser stops here
                self._ignoring = True
        else:
            if self._unparsed_bytes > HEAD_BYTES_MAX:
                self._refuse_request(
                    too_large(
                        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head", HEAD_BYTES_MAX
                    )
                )
        if self._has_stepped:
            self._has_stepped = False
            self._await_client()
        return not self._ignoring

    def _refuse(self, refusal: Refusal) -> None:
        """Parse nothing more; write the refusal once earlier requests are answered."""
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
        """Count a request refused before its credential is read, or 429."""
        try:
            self._deps.count_anonymous(self._peer)
        except RateLimited as error:
            return refused_with(error, legacy=self._deps.legacy_rate_limit_headers)
        return refusal

    def _drop_unfinished(self) -> None:
        """Drop the last request if its body will never be complete."""
        broken = self.cycle
        if broken is not None and broken.more_body and not broken.response_complete:
            broken.disconnected = True
            broken.waiting_for_100_continue = False  # else its task writes one after the refusal
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
        """Write the refusal, end our side, and read on for a moment.

        Closing at once, with input on its way, would send a reset that may overtake it.
        """
        if self.transport.is_closing():
            return
        self._refused = True
        self._log.info(
            "gateway.request_refused",
            address=self._peer,
            status=refusal.status,
            answer=refusal.body.decode(),
        )
        self.transport.write(refusal_response(refusal))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._await_client()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED_MAX:
            text = (
                f"at most {PIPELINED_MAX} requests of a connection may wait behind the one that is"
                " answered"
            )
            self._refuse_rest(refused_with(InvalidMessage(text)))
        super().on_message_begin()
        self._head_bytes, self._head_is_whole = 0, False
        self._has_stepped = True

    def on_url(self, url: bytes) -> None:
        self.url += url
        self._unparsed_bytes = 0
        if len(self.url) > PATH_BYTES_MAX:
            self._check_url()

    def _check_url(self) -> None:
        if len(self.url) > URL_BYTES_MAX:
            self._refuse_rest(
                too_large(HTTPStatus.REQUEST_URI_TOO_LONG, "the path and query", URL_BYTES_MAX)
            )
        if len(self.url.partition(b"?")[0]) > PATH_BYTES_MAX:
            self._refuse_rest(
                too_large(HTTPStatus.REQUEST_URI_TOO_LONG, "the path", PATH_BYTES_MAX)
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_is_whole:
            super().on_header(name, value)
        self._unparsed_bytes = 0
        self._head_bytes += len(name) + len(value) + HEADER_OVERHEAD_BYTES
        if len(self.headers) > HEADERS_MAX:
            fields = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._refuse_rest(too_large(fields, "the head", HEADERS_MAX, "header fields"))
        if self._head_bytes + len(self.url) > HEAD_BYTES_MAX:
            self._refuse_rest(
                too_large(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head", HEAD_BYTES_MAX)
            )

    def _refuse_rest(self, refusal: Refusal) -> NoReturn:
        """Refuse from within a parser callback; the exception stops the parser."""
        self._refuse_request(refusal)
        raise _Refused

    def on_headers_complete(self) -> None:
        self._head_is_whole, self._body_is_whole = True, False
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1:
            self._refuse_rest(
                refused_with(
                    InvalidMessage("the header Host was given more than once", field="Host")
                )
            )
        if not hosts and self.parser.get_http_version() == "1.1":
            self._refuse_rest(
                refused_with(InvalidMessage("a request must have a Host header", field="Host"))
            )
        if self.parser.should_upgrade() and self._should_upgrade():
            self._check_upgrade()
        super().on_headers_complete()
        self._has_stepped = True

    def _check_upgrade(self) -> None:
        """Check what only HTTP knows of a handshake; ``handshake`` judges the rest."""
        url, sent = parse_url(self.url), dict(self.headers)
        self._path, self._query = (
            unquote(url.path.decode("ascii")),
            (url.query or b"").decode("latin-1"),
        )
        error = None
        if b"transfer-encoding" in sent or sent.get(b"content-length", b"0") != b"0":
            error = InvalidMessage("a request that opens a WebSocket has no body")
        elif self._unanswered or self.flow.write_paused:
            error = InvalidMessage(
                "a handshake must wait until the requests before it are answered and read"
            )
        if error is not None:
            self._refuse_handshake(error)
            raise _Refused

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering, self._on_disconnect = cycle, None
        self._unread_seconds_max = self._deps.times.unread_seconds
        super()._start_asgi_task(cycle, partial(self._answer, app, cycle))

    async def _answer(
        self, app: App, cycle: RequestResponseCycle, scope: Any, receive: Any, _send: Any
    ) -> None:
        """Run the application; a streamed answer that it cut ends the connection."""
        # Our own keys, not ASGI's: api/request.py reads them. A call of ``receive``
        # that waits for the disconnect would keep a task for each streamed answer.
        answer = OneWrite(cycle, self._set_unread_seconds, self.loop.time)
        scope["holdfast.on_disconnect"] = self._set_on_disconnect
        scope["holdfast.piece_writer"] = answer
        scope["holdfast.take_body"] = partial(self._take_body, cycle)
        try:
            await app(scope, receive, answer.send)
        except ConnectionAbortedError:
            cycle.disconnected = True
            self.transport.close()

    def _take_body(self, cycle: RequestResponseCycle) -> bytes | None:
        """The body if all of it has come; None if not, or if the client has left."""
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body = bytes(cycle.body)
        cycle.body.clear()
        self.flow.resume_reading()
        return body

    def _set_on_disconnect(self, callback: Callable[[bool], None]) -> None:
        """Call back when the connection is lost, and when the client ends its side. The
        body has been read."""
        if self.transport.is_closing():
            self.loop.call_soon(callback, True)
            return
        if self._ended:
            self.loop.call_soon(callback, False)
        self.flow.resume_reading()
        self._on_disconnect = callback
        if self._answering is not None:
            self._answering.message_event = NO_WAITER  # type: ignore[assignment]

    def _set_unread_seconds(self, seconds: float) -> None:
        self._unread_seconds_max = seconds

    def on_response_complete(self) -> None:
        """uvicorn's method with our refusals and timers."""
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
        self._body_is_whole = self._has_stepped = True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deps.memory_budget.on_response_waits(self.transport)
        self._set_timer(self._unread_seconds_max, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deps.memory_budget.on_response_read(self.transport)
        self._await_client()

    def _should_upgrade_to_ws(self) -> bool:
        return True

    def _upgrade(self, behind_it: int) -> None:
        """Leave HTTP. ``behind_it``: bytes received after the head."""
        if self._refusal is not None:
            return
        if behind_it:
            self._refuse_handshake(
                InvalidMessage("a frame must wait for the answer to the handshake")
            )
            return
        scope = self.scope
        request = UpgradeRequest(
            scope["method"], scope["http_version"], self._path, self._query, self.headers
        )
        refusal = self._deps.port.upgrade(request, self.transport)
        if refusal is not None:
            self._refuse(refusal)
            return
        self._ignoring, self._has_stepped = True, False
        self._cancel_timer()
        self._leave()
        self.connections.discard(self)
        # breaks the reference cycle, as uvicorn's connection_lost does
        self.parser = None  # type: ignore[assignment]

    def _leave(self) -> None:
        if self._counted_as is not None:
            self._deps.counts.close(self._counted_as)
            telemetry.http_connections(self._deps.counts.total)
            self._counted_as = None

    def _await_client(self) -> None:
        """Set the deadline of the client's next step; none while it waits for us."""
        if self.flow.write_paused:
            return
        self._cancel_timer()
        if self._refused or not (self._body_is_whole or self._unanswered):
            self._set_timer(self._deps.times.rest_seconds, self.transport.close)
        elif not self._unanswered:
            self._set_timer(self._deps.times.head_seconds, self.transport.close)

    def _set_timer(self, seconds: float, otherwise: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, otherwise)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
