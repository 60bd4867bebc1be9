"""HTTP servers that never end their answer, one for each way of ``ENDLESS``, as fast as
it is read.

A program of its own, at the lowest priority, so that a test measures the server that
calls it. It prints their ports. Each has its own, because connections are kept by
address: what one sent behind an answer would be another's answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_CHUNKED = b"HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n"

ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "early_hints": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"),
    "blank_lines": (b"", b"\r\n"),
    "header_fields": (b"HTTP/1.1 200 OK\r\n", b"X:\r\n"),
    "long_header": (b"HTTP/1.1 200 OK\r\nX: ", b"a" * 100),
    "answers": (OK, OK),
    "blank_lines_after_answer": (OK, b"\r\n"),
    "body": (_CHUNKED, b"10000\r\n" + b"a" * 0x10000 + b"\r\n"),
    "tiny_chunks": (_CHUNKED, b"1\r\na\r\n"),
    "chunk_extension": (_CHUNKED + b"1;", b"a" * 100),
    "trailers": (_CHUNKED + b"0\r\n", b"X: a\r\n"),
}
"""What is sent once, and what is sent again and again behind it."""


class _Answers(StreamRequestHandler):
    def handle(self) -> None:
        length = 0
        for line in iter(self.rfile.readline, b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        self.rfile.read(length)
        assert isinstance(self.server, _Server)
        start, endless = ENDLESS[self.server.kind]
        with suppress(OSError):
            self.wfile.write(start)
            while True:
                self.wfile.write(endless * max(1, 0x10000 // len(endless)))


class _Server(ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, kind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.kind = kind


@contextmanager
def hostile_receivers() -> Iterator[dict[str, str]]:
    """The addresses of those that run, by kind."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__))], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        ports = [int(port) for port in process.stdout.readline().split()]
        yield {kind: f"http://127.0.0.1:{port}" for kind, port in zip(ENDLESS, ports, strict=True)}
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    os.nice(19)
    servers = [_Server(kind) for kind in ENDLESS]
    print(*(server.server_address[1] for server in servers), flush=True)
    for server in servers[1:]:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    servers[0].serve_forever()
