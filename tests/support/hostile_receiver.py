"""An HTTP server that never ends its answer, in the way that its path names (``ENDLESS``), as fast as it is read.

A program of its own, at the lowest priority, so that a test measures the server that calls it. It prints its port.
"""

from __future__ import annotations

import os
import subprocess
import sys
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
        path = self.rfile.readline().split()[1].decode()
        length = 0
        for line in iter(self.rfile.readline, b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        self.rfile.read(length)
        start, endless = ENDLESS[path.split("/")[1]]
        with suppress(OSError):
            self.wfile.write(start)
            while True:
                self.wfile.write(endless * max(1, 0x10000 // len(endless)))


class _Server(ThreadingTCPServer):
    daemon_threads = True


@contextmanager
def hostile_receiver() -> Iterator[str]:
    """The address of one that runs; a kind follows as its path."""
    process = subprocess.Popen([sys.executable, str(Path(__file__))], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    os.nice(19)
    with _Server(("127.0.0.1", 0), _Answers) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
