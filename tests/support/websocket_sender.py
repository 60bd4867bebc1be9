"""A WebSocket client on a raw socket: it sends bytes unchanged and reads on demand."""

from __future__ import annotations

import asyncio
import socket

UPGRADE = (
    "GET /v1/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection:"
    " Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


class Sender:
    """One connection."""

    def __init__(self, port: int, credential: str = "", receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.setblocking(False)
        self._port = port
        self._head = (
            UPGRADE + (f"Authorization: Bearer {credential}\r\n" if credential else "") + "\r\n"
        )
        self._loop = asyncio.get_running_loop()
        self.got = b""

    async def connect(self, until: bytes = b"\r\n\r\n") -> Sender:
        await self._loop.sock_connect(self.socket, ("127.0.0.1", self._port))
        await self._loop.sock_sendall(self.socket, self._head.encode())
        while until not in self.got:
            more = await self._loop.sock_recv(self.socket, 4096)
            assert more, self.got
            self.got += more
        return self

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.socket, data)

    async def read_to_end(self) -> bytes:
        """What comes until the server ends; a reset raises."""
        got = b""
        while more := await self._loop.sock_recv(self.socket, 65_536):
            got += more
        return got
