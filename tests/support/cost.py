"""What a request, a frame or a handshake costs a running node: processor time in one
turn of its loop.

The node runs on a thread of its own, on a loop that times each of its turns by
``thread_time``; whoever asks is on another thread and speaks raw bytes. A cost is the
longest turn between the first byte and the answer, the least of five tries, and is
divided by how much slower than usual the same process decodes a reference document at
that moment.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.clock import timestamp
from holdfast.node.lifecycle import running
from holdfast.node.node import Node
from holdfast.settings import load

T = TypeVar("T")
TENANT, USER = "tenant", "heavy"
TRIES = 5
REFERENCE = msgspec.json.encode(
    [{"id": n, "name": f"user-{n}", "tags": ["a", "b"]} for n in range(4_000)]
)
REFERENCE_SECONDS = 0.0026
"""What decoding it takes on the machine of the bounds, when that is quiet."""
ANSWER_SECONDS_MAX = 10.0


class TimedLoop(asyncio.SelectorEventLoop):
    """Remembers the longest turn since it was last asked."""

    longest = 0.0

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest = max(self.longest, time.thread_time() - began)


def slowness() -> float:
    """How much slower than usual this process is now; never below 1."""
    best = min(_timed(lambda: msgspec.json.decode(REFERENCE)) for _ in range(3))
    return max(1.0, best / REFERENCE_SECONDS)


def _timed(do: Callable[[], object]) -> float:
    began = time.thread_time()
    do()
    return time.thread_time() - began


class CostedNode:
    """A node on its own thread, and what it takes to ask it as anybody."""

    def __init__(self, node: Node, loop: TimedLoop) -> None:
        self.node = node
        self._loop = loop
        self._numbers = count(1)
        at = timestamp(time.time())
        self._tenant_key = self.run(node.keys.issue("tenant", "cost", at, tenant=TENANT))[1]
        self._admin_key = self.run(node.keys.issue("admin", "cost", at))[1]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the node's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def credential(self, caller: str) -> list[str]:
        """Headers of a caller of this kind."""
        if caller == "operator":
            return [f"Authorization: Bearer {self._admin_key}"]
        return [
            f"Authorization: Bearer {self._tenant_key}",
            *([f"X-Act-As: {USER}"] if caller == "user" else []),
        ]

    def address(self) -> str:
        """Another one each time."""
        number = next(self._numbers)
        return f"X-Forwarded-For: 198.18.{number >> 8 & 255}.{number & 255}"

    def cost(self, ask: Callable[[], object]) -> float:
        """Seconds of the longest turn while it is asked: the least of some tries."""
        best = float("inf")
        for _ in range(TRIES):
            self.settled()
            self.begin()
            ask()
            self.settled()
            best = min(best, self._loop.longest)
            if best < 0.001:
                break  # far below every bound
        return best / slowness()

    def begin(self) -> None:
        """What came before this moment is not judged."""
        self._loop.longest = 0.0

    def settled(self) -> None:
        """When the loop has come to the end of the turn it is in."""
        for _ in range(2):
            self.run(asyncio.sleep(0))

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with socket.create_connection(
            ("127.0.0.1", self.node.settings.server.port), ANSWER_SECONDS_MAX
        ) as sock:
            yield sock

    def request(self, data: bytes) -> bytes:
        """The answer to one request; what it was if it is not whole."""
        with self.connected() as sock:
            try:
                sock.sendall(data)
            except ConnectionError:
                pass  # refused before it was all sent; the answer is there
            received = b""
            while not _whole(received) and (more := _read(sock)):
                received += more
            return received


def _read(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 20)
    except ConnectionError:
        return b""


def _whole(received: bytes) -> bool:
    head, found, body = received.partition(b"\r\n\r\n")
    if not found:
        return False
    lines = head.lower().split(b"\r\n")
    length = next((int(line[16:]) for line in lines if line.startswith(b"content-length: ")), 0)
    return len(body) >= length


@contextmanager
def costed_node(state: Path) -> Iterator[CostedNode]:
    """A node with the default settings, but that this machine is its proxy: so
    everybody can be somebody else.
    """
    settings = load(
        None,
        {},
        {"server.port": 0, "server.state_dir": str(state), "server.log_level": "info",
         "server.trusted_proxies": ["127.0.0.1"]},
    )  # fmt: skip
    loop, ready, stop = TimedLoop(), threading.Event(), asyncio.Event()
    served: list[Node] = []

    async def serve() -> None:
        async with running(settings) as node:
            served.append(node)
            ready.set()
            await stop.wait()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(serve())
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=run, name="node")
    thread.start()
    ready.wait(60)
    assert served, "the node did not start"
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield CostedNode(served[0], loop)
    finally:
        gc.enable()
        gc.unfreeze()
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
