"""The one port: a listening socket, and HTTP on it."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import uvicorn
from httptools import HttpParserUpgrade
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from holdfast import telemetry
from holdfast.access.door import HttpCounts
from holdfast.bounds import KIB
from holdfast.errors import BadSetting, InvalidMessage, Unavailable
from holdfast.gateway.handshake import RETURN_SECONDS, Refusal, no_handshake, refused_with
from holdfast.gateway.port import Port

HTTP_STOP_SECONDS = 5
"""How long requests that are open after the drain may still take."""
HEAD_SECONDS = 5.0
"""How long a client may take for the head of a request, before it has said who it is: as long as for a handshake."""
HEAD_BYTES_MAX = 64 * KIB
REST_SECONDS = 2.0
"""How long the rest of a request is read that was answered without it: time for the answer to be read, no more."""
TAKEN_SECONDS = 30.0
"""How long an answer may stand in the buffers without being taken."""
BACKLOG = 2048


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
    """uvicorn's protocol, which would take any number of connections; wait for ever for a head, and take one of any
    size; for the rest of a body that was refused; and for who asks and does not take the answer. It would hand over
    any upgrade, lose what came behind one, and answer what is no HTTP with words that are not ours."""

    _head_bytes = 0
    _segment_bytes = 0
    _refused = False

    def __init__(self, counts: HttpCounts, **given: Any) -> None:
        super().__init__(**given)
        self._counts = counts
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._peer: str | None = None
        """Under which address it is counted, as long as it is."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        peer = self.client[0] if self.client else ""
        if full := self._counts.open(peer):
            telemetry.http_connection_refused()
            self._refuse(refused_with(Unavailable(full, retry_after_seconds=RETURN_SECONDS)))
            return
        self._peer = peer
        telemetry.http_connections(self._counts.total)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for what in list(self._timers):
            self._came(what)
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._segment_bytes = len(data)
        super().data_received(data)
        if "head" in self._timers:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.send_400_response(f"the head of a request has at most {HEAD_BYTES_MAX} bytes")

    def send_400_response(self, msg: str) -> None:
        self._refuse(refused_with(InvalidMessage(msg)))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer, and read no more than it takes for the answer to be read: closed at once, with bytes of the client on
        their way, the kernel would send a reset, which may overtake it."""
        self._refused = True
        self._came("head")
        self.transport.write(_response(refusal))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._await("end of what is refused", REST_SECONDS, self.transport.close)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if "head" not in self._timers:  # the next request of a connection that was kept
            self._await_head()

    def on_headers_complete(self) -> None:
        self._came("head")
        super().on_headers_complete()
        if self.parser.should_upgrade() and self._should_upgrade():
            scope = self.scope
            if (error := no_handshake(scope["method"], scope["http_version"], scope["headers"])) is not None:
                self._refuse_handshake(error)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            self._await("rest of the body", REST_SECONDS, self.transport.close)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._came("rest of the body")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await("room for the answer", TAKEN_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._came("room for the answer")

    def _refuse_handshake(self, error: InvalidMessage) -> None:
        refusal = refused_with(error)
        telemetry.handshake_refused(refusal.status)
        self._refuse(refusal)

    def handle_websocket_upgrade(self) -> None:
        if self._refused:
            return
        upgrade = sys.exc_info()[1]  # uvicorn is handling it, and drops what came behind the head
        if isinstance(upgrade, HttpParserUpgrade) and upgrade.args[0] < self._segment_bytes:
            self._refuse_handshake(InvalidMessage("a frame must wait for the answer to the handshake"))
            return
        self._leave()
        super().handle_websocket_upgrade()
        self.parser = None  # type: ignore[assignment]  # as where a connection is lost: they hold each other

    def _leave(self) -> None:
        if self._peer is not None:
            self._counts.close(self._peer)
            telemetry.http_connections(self._counts.total)
            self._peer = None

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._await("head", HEAD_SECONDS, self.transport.close)

    def _await(self, what: str, seconds: float, otherwise: Callable[[], None]) -> None:
        self._came(what)
        self._timers[what] = self.loop.call_later(seconds, otherwise)

    def _came(self, what: str) -> None:
        if (timer := self._timers.pop(what, None)) is not None:
            timer.cancel()


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
async def serving(
    app: ASGIApp, port: Port, counts: HttpCounts, listening: socket.socket, broken: asyncio.Event
) -> AsyncIterator[None]:
    """Serve HTTP while ``counts`` has room, and hand upgrades to ``port``. ``broken`` is set if it ends by itself."""
    config = uvicorn.Config(
        app,
        http=partial(_Requests, counts),  # type: ignore[arg-type]  # a factory serves where it wants a class
        ws=port,  # type: ignore[arg-type]
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
