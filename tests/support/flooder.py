"""A client that sends frames as fast as the network takes them, and comes back at once
when it is closed.

A program of raw sockets and prebuilt bytes, so that a test measures the server and not
the load generator. It runs at the lowest priority and reads orders from its input, one
JSON object a line: ``{"port", "address", "kind", "token", "chat_id", "reads",
"seconds"}``. ``address`` is where it connects from; without a ``token`` it never
authenticates; one that does not read leaves everything it is sent in the kernel. The
answer is one line: ``{"connections", "bytes"}``.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable

CHUNK_BYTES = 64 * 1024
SOCKET_BUFFER_BYTES = 4096
"""A small receive buffer: a connection that does not read soon blocks."""
PING, PONG, BINARY, TEXT, CONTINUATION, CLOSE = 0x9, 0xA, 0x2, 0x1, 0x0, 0x8


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    """A client's frame, with the mask 0: it leaves the payload as it is."""
    first, size = bytes([(0x80 if fin else 0) | opcode]), len(payload)
    if size < 126:
        return first + bytes([0x80 | size]) + bytes(4) + payload
    return first + b"\xfe" + size.to_bytes(2, "big") + bytes(4) + payload


def said(kind: str, **payload: object) -> bytes:
    return json.dumps({"type": kind, "request_id": "q", "payload": payload}).encode()


def fragmented(data: bytes, parts: int = 16) -> bytes:
    size = -(-len(data) // parts)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    last = len(pieces) - 1
    return b"".join(
        frame(CONTINUATION if i else TEXT, piece, fin=i == last) for i, piece in enumerate(pieces)
    )


def sends(chat_id: str) -> bytes:
    """A hundred sends, each under a key of its own."""
    prefix = os.urandom(8).hex()
    body = {"chat_id": chat_id, "content": "x", "content_type": "text/plain"}
    return b"".join(
        frame(TEXT, said("send_message", client_message_id=f"{prefix}{n}", **body))
        for n in range(100)
    )


Build = Callable[[str, str], bytes]
KINDS: dict[str, Build] = {
    "empty ping": lambda token, chat: frame(PING),
    "ping with a body": lambda token, chat: frame(PING, b"x" * 125),
    "pong": lambda token, chat: frame(PONG),
    "send_message": lambda token, chat: sends(chat),
    "send_message, invalid": lambda token, chat: frame(
        TEXT, said("send_message", chat_id=chat, content="")
    ),
    "typing_start": lambda token, chat: frame(TEXT, said("typing_start", chat_id=chat)),
    "ack": lambda token, chat: frame(TEXT, said("ack", chat_id=chat, epoch=0, sequence=0)),
    "read": lambda token, chat: frame(TEXT, said("read", chat_id=chat, sequence=1)),
    "sync_request": lambda token, chat: frame(
        TEXT, said("sync_request", chat_id=chat, epoch=0, after_sequence=0)
    ),
    "resume": lambda token, chat: frame(TEXT, said("resume", cursors={})),
    "resume with 500 cursors": lambda token, chat: frame(
        TEXT, said("resume", cursors={f"chat_{n}": [0, 0] for n in range(500)}, more=True)
    ),
    "authenticate": lambda token, chat: frame(TEXT, said("authenticate", token=token or "x")),
    "authenticate, bad": lambda token, chat: frame(TEXT, said("authenticate", token="x" * 900)),
    "heartbeat_ack": lambda token, chat: frame(TEXT, b'{"type":"heartbeat_ack"}'),
    "unknown type": lambda token, chat: frame(TEXT, said("no_such_type")),
    "not JSON": lambda token, chat: frame(TEXT, b"{"),
    "60 KB that are not JSON": lambda token, chat: frame(TEXT, b"[" * 60_000),
    "empty text": lambda token, chat: frame(TEXT),
    "fragments": lambda token, chat: fragmented(b'{"type":"heartbeat_ack"}'),
    "binary": lambda token, chat: frame(BINARY, b"x"),
    "no frame at all": lambda token, chat: b"\xff" * 16,
    "close": lambda token, chat: frame(CLOSE),
    "handshakes alone": lambda token, chat: b"",
    "single bytes": lambda token, chat: frame(TEXT, b" " * 60_000),
}
"""What each kind sends, over and over."""


class Flooder:
    """One order."""

    def __init__(self, order: dict[str, object]) -> None:
        self._server = ("127.0.0.1", int(str(order["port"])))
        self._from = (str(order["address"]), 0)
        self._kind, self._token = str(order["kind"]), str(order["token"])
        self._reads = bool(order["reads"])
        one = KINDS[self._kind](self._token, str(order["chat_id"]))
        single = self._kind == "single bytes"
        self._chunk = one * max(1, CHUNK_BYTES // len(one)) if one else b""
        self._piece_bytes = 1 if single else len(self._chunk)
        self._until = time.monotonic() + float(str(order["seconds"]))
        self.connections = 0
        self.bytes = 0

    def run(self) -> None:
        while time.monotonic() < self._until:
            try:
                with socket.socket() as sock:
                    self._connect(sock)
                    self._flood(sock)
            except OSError:
                continue

    def _connect(self, sock: socket.socket) -> None:
        if not self._reads:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        sock.settimeout(max(self._until - time.monotonic(), 0.01))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind(self._from)
        sock.connect(self._server)
        credential = f"Authorization: Bearer {self._token}\r\n" if self._token else ""
        sock.sendall(
            b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            + credential.encode()
            + b"\r\n"
        )
        answer = sock.recv(4096)
        if not answer.startswith(b"HTTP/1.1 101"):
            raise ConnectionError(answer[:40])
        while self._token and b"connection_established" not in answer:
            if not (more := sock.recv(4096)):
                raise ConnectionError("closed before it was established")
            answer += more
        self.connections += 1

    def _flood(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        rest = memoryview(self._chunk)
        while rest and (left := self._until - time.monotonic()) > 0:
            readable, writable, _ = select.select(
                [sock] if self._reads else [], [sock], [], min(left, 0.05)
            )
            if readable and not sock.recv(1 << 20):
                return
            if writable:
                sent = sock.send(rest[: self._piece_bytes])
                self.bytes += sent
                rest = rest[sent:] or memoryview(self._chunk)


def main() -> None:
    os.nice(19)
    for line in sys.stdin:
        flooder = Flooder(json.loads(line))
        flooder.run()
        print(json.dumps({"connections": flooder.connections, "bytes": flooder.bytes}), flush=True)


if __name__ == "__main__":
    main()
