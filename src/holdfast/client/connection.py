"""One WebSocket over picows, and the token it is opened with.

``connect`` opens a ``ClientSocket``: whole text messages in, frames out, and only this
module's own exceptions. ``fresh_token`` gets a token from the application's provider;
``claims_of`` reads when a token expires.
"""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
from picows import (
    WSCloseCode,
    WSError,
    WSFrame,
    WSHandshakeError,
    WSListener,
    WSMsgType,
    WSParsedURL,
    WSTransport,
    ws_connect,
)

from holdfast.clock import SystemClock
from holdfast.errors import BadSetting, OperatorError, Refused
from holdfast.resilience import retry_after_seconds
from holdfast.wire.frames import ErrorBody

MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""A page has at most 256 KiB of content: a larger message is not our server's."""


class HandshakeRefused(Exception):
    """The handshake got an HTTP status other than 101.

    ``message``: our server's error, a redirect's target, or empty if anything else
    answered.
    """

    def __init__(self, status: int, retry_after: float | None, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.message = message


class Unreachable(Exception):
    """No connection could be made; the text says why."""


def socket_url(url: str) -> str:
    """The WebSocket URL of an http(s) or ws(s) address; default path /v1/ws."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme not in ("ws", "wss") or not parts.hostname:
        raise BadSetting(f"{url!r} is no server address; it should look like http://127.0.0.1:8080")
    if parts.query or parts.username:
        raise BadSetting("credentials do not belong into the address; hand over a token")
    path = parts.path if parts.path.strip("/") else "/v1/ws"
    return f"{scheme}://{parts.netloc}{path}"


async def connect(
    url: str,
    headers: Mapping[str, str],
    on_opened: Callable[[ClientSocket], None],
    on_received: Callable[[bytes], None],
    on_partial_frame: Callable[[], None],
    timeout_seconds: float,
) -> ClientSocket:
    """Open a connection. Raises HandshakeRefused or Unreachable, nothing foreign.

    A handshake that is given up is shut down below picows and TLS, which would wait for
    the peer's answer. picows has no timeout of its own for it: its error would come
    when nobody waits for it any more.

    Redirects are not followed: they would carry the token to another host.
    """
    sockets: list[ClientSocket] = []
    streams: list[socket.socket] = []

    async def stream(where: WSParsedURL) -> socket.socket:
        streams.append(await _open_stream(where.host, where.port))
        return streams[-1]

    def listener() -> ClientSocket:
        sockets.append(ClientSocket(on_opened, on_received, on_partial_frame))
        return sockets[-1]

    try:
        async with asyncio.timeout(timeout_seconds):
            await ws_connect(
                listener,
                url,
                extra_headers=dict(headers),
                socket_factory=stream,
                websocket_handshake_timeout=None,
                max_frame_size=MESSAGE_BYTES_MAX,
                max_redirects=0,
                logger_name="holdfast.client",
            )
    except WSHandshakeError as error:
        raise _refusal(error) from error
    except asyncio.CancelledError:
        _shut_down(streams)
        raise
    except TimeoutError as error:
        _shut_down(streams)
        raise Unreachable(f"no answer from {url} within {timeout_seconds:g} s") from error
    except (OSError, WSError) as error:
        raise Unreachable(f"cannot reach {url}: {error}") from error
    if not sockets:  # the peer closed before its response: picows made no listener
        raise Unreachable(f"{url} hung up during the handshake")
    return sockets[-1]


async def _open_stream(host: str, port: int) -> socket.socket:
    """A connection to the first address of the host that takes one. OSError of the
    first if none does.
    """
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for *kind, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        stream = socket.socket(*kind)
        stream.setblocking(False)
        try:
            await loop.sock_connect(stream, address)
        except OSError as error:
            stream.close()
            failure = failure or error
        except BaseException:
            stream.close()
            raise
        else:
            return stream
    raise failure or OSError("the host has no address")


def _shut_down(streams: Sequence[socket.socket]) -> None:
    for stream in streams:
        with suppress(OSError):  # its transport has closed it
            stream.shutdown(socket.SHUT_RDWR)


def _refusal(error: WSHandshakeError) -> Exception:
    response = error.response
    if response is None:
        return Unreachable(f"the handshake failed: {error}")
    status = int(response.status)
    message = response.headers.get("Location", "") if 300 <= status < 400 else ""
    try:
        body = msgspec.json.decode(error.raw_body or b"", type=ErrorBody)
        message = f"{body.error.code}: {body.error.message}"
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    wait = retry_after_seconds(response.headers.get("Retry-After", ""), SystemClock.now())
    return HandshakeRefused(status, wait, message)


class ClientSocket(WSListener):
    """An open connection. ``closed`` resolves to the close code, or None.

    ``on_opened`` is called before the first ``on_received``: the server's first frame
    may arrive with its handshake. ``on_partial_frame``: bytes of an incomplete frame
    arrived.
    """

    def __init__(
        self,
        on_opened: Callable[[ClientSocket], None],
        on_received: Callable[[bytes], None],
        on_partial_frame: Callable[[], None],
    ) -> None:
        self._on_opened = on_opened
        self._on_received = on_received
        self.on_partial_frame = on_partial_frame
        self.unread = 0
        """Bytes of the incomplete frame."""
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._transport: WSTransport | None = None
        self.closed: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def send(self, data: bytes) -> None:
        """Write a text message; after the end, do nothing."""
        if self._transport is not None:
            self._transport.send(WSMsgType.TEXT, data)

    def cut(self) -> None:
        """End it now, without the closing handshake."""
        if self._transport is not None:
            self._transport.disconnect(False)

    def close(self) -> None:
        """End it with a normal closing frame."""
        if self._transport is not None:
            self._transport.send_close(WSCloseCode.OK)
            self._transport.disconnect()

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        raw = transport.underlying_transport
        raw.set_protocol(_ReportingProtocol(raw.get_protocol(), self))
        self._on_opened(self)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        self.unread = frame.tail_size
        if frame.msg_type == WSMsgType.CLOSE:
            transport.disconnect()
            return
        if frame.msg_type not in (WSMsgType.TEXT, WSMsgType.CONTINUATION):
            return
        data = frame.get_payload_as_bytes()
        if frame.fin and not self._parts:
            self._on_received(data)
            return
        self._parts.append(data)
        self._parts_bytes += len(data)
        if self._parts_bytes > MESSAGE_BYTES_MAX:
            transport.disconnect(False)
        elif frame.fin:
            whole, self._parts, self._parts_bytes = b"".join(self._parts), [], 0
            self._on_received(whole)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self._transport = None
        handshake = transport.close_handshake
        received = handshake.recv if handshake is not None else None
        if not self.closed.done():
            self.closed.set_result(cast(int, received.code) if received is not None else None)


class _ReportingProtocol(asyncio.BufferedProtocol):
    """picows's protocol, reporting every read: picows reports whole frames only."""

    def __init__(self, protocol: Any, socket: ClientSocket) -> None:
        self._protocol = protocol
        self._socket = socket

    def get_buffer(self, sizehint: int) -> Any:
        return self._protocol.get_buffer(sizehint)

    def buffer_updated(self, size: int) -> None:
        self._socket.unread += size
        self._protocol.buffer_updated(size)
        if self._socket.unread:
            self._socket.on_partial_frame()

    def eof_received(self) -> Any:
        return self._protocol.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._protocol.connection_lost(error)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


TokenProvider = Callable[[], Awaitable[str]]


class NoToken(Exception):
    """No token is available now; the text says why."""


async def fresh_token(provider: TokenProvider, timeout_seconds: float) -> str:
    """A new token from the application's provider.

    The provider's ``Refused`` or ``OperatorError`` is final and passes through. Any
    other exception, or a timeout, becomes NoToken: the provider may be unavailable for
    a moment, and the exceptions of its libraries are unknown here.
    """
    try:
        async with asyncio.timeout(timeout_seconds) as patience:
            return await provider()
    except (Refused, OperatorError):
        raise
    except Exception as error:
        why = (
            f"none within {timeout_seconds:g} s"
            if patience.expired()
            else str(error) or type(error).__name__
        )
        raise NoToken(f"no token: {why}") from error


class Claims(msgspec.Struct, frozen=True):
    """The claims the client reads from a JWT.

    The server verifies them, not the client.
    """

    sub: str = ""
    tenant: str = ""
    exp: float | None = None
    jti: Any = None


_claims = msgspec.json.Decoder(Claims)


def claims_of(token: str) -> Claims:
    """The claims of a JWT; empty claims if it is not a JWT."""
    parts = token.split(".")
    try:
        return _claims.decode(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (IndexError, ValueError, msgspec.DecodeError):
        return Claims()
