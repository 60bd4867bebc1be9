"""A handshake of the client with a server that hangs, over TLS."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tls import certificate

from holdfast.client.connection import ClientSocket, Unreachable, connect


class HangingServer:
    """Takes the request for an upgrade, and does nothing any more."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.url = ""
        self._peer: socket.socket | None = None

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        self._peer = socket.fromfd(
            writer.get_extra_info("socket").fileno(), socket.AF_INET, socket.SOCK_STREAM
        )
        self._peer.setblocking(False)
        self.asked.set()
        await asyncio.sleep(3600)

    async def is_left(self) -> None:
        """Until the client has closed the connection, without an answer to it."""
        assert self._peer is not None
        while await asyncio.get_running_loop().sock_recv(self._peer, 4096):
            pass
        self._peer.close()


@asynccontextmanager
async def hanging(folder: Path) -> AsyncIterator[HangingServer]:
    cert, key = certificate(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    hung = HangingServer()
    server = await asyncio.start_server(hung.take, "127.0.0.1", 0, ssl=context)
    hung.url = f"wss://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/ws"
    async with server:
        yield hung


async def opened(url: str, seconds: float) -> ClientSocket:
    return await connect(url, {}, lambda _: None, lambda _: None, lambda: None, seconds)


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_handshake_that_is_given_up_is_closed_at_once_and_leaves_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, error: unhandled.append(error))
    async with asyncio.timeout(20), hanging(tmp_path) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        seconds = 60.0 if is_cancelled else 1.0
        connecting = asyncio.create_task(opened(server.url, seconds))
        await server.asked.wait()
        if is_cancelled:
            connecting.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else Unreachable):
            await connecting
        await server.is_left()
    del connecting
    gc.collect()
    assert not unhandled


async def test_server_with_several_addresses_is_reached_at_the_one_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    closed = ("127.0.0.1", 1)

    async def addresses(*_: object, **__: object) -> list[Any]:
        stream = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
        return [(*stream, closed), (*stream, ("127.0.0.1", port))]

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "getaddrinfo", addresses)
    async with server:
        with pytest.raises(Unreachable, match="hung up"):
            await opened(f"ws://chat.example.com:{port}/v1/ws", 10)
