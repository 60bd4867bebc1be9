"""The load of `messaging.py`: connections that send, count, and wait for all."""

from __future__ import annotations

import asyncio
import json
import select
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from harness import Child, ask, cpu_seconds

ARRIVAL_SECONDS_MAX = 30.0
"""A message that has not reached everybody by then is lost, and the run with it."""
AT_ONCE = 100
"""Of a crowd that comes in."""
CONTENT = b"x" * 100
SEND_FRAME = (
    b'{"type":"send_message","payload":{"client_message_id":"%b","chat_id":"%b","content":"%b"}}'
)
NUMBER = b"%012d"
ACK = b'{"type":"message_ack","payload":{"client_message_id":"'
MESSAGE = b'{"type":"message","payload":{'
SEQUENCE = b',"sequence":'
NEW = b'"deduplicated":false}'
Cursors = dict[str, tuple[int, int]]


class Client(WSListener):
    """One connection of an audience, or of a paced load: counts what it gets."""

    def __init__(self) -> None:
        self.frames = 0
        self.transport: WSTransport
        self.chat_id = ""
        self.sent_at: dict[str, float] = {}
        self.latencies: list[float] = []
        self.on_frame: Callable[[], None] = lambda: None
        self.resumed = asyncio.get_running_loop().create_future()
        self._ids = count()

    def on_ws_connected(self, transport: WSTransport) -> None:
        self.transport = transport

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type != WSMsgType.TEXT:
            return
        data = frame.get_payload_as_bytes()
        if data.startswith(b'{"type":"message_ack"'):
            self._acked(data)
        elif data.startswith(b'{"type":"message"'):
            self.frames += 1
            self.on_frame()
        elif data.startswith(b'{"type":"heartbeat"'):
            transport.send(WSMsgType.TEXT, b'{"type":"heartbeat_ack"}')
        elif data.startswith(b'{"type":"resumed"') and not self.resumed.done():
            self.resumed.set_result(None)

    def _acked(self, data: bytes) -> None:
        if self.sent_at:
            key = data[data.index(b'"client_message_id":"') + 21 :].split(b'"', 1)[0].decode()
            if (at := self.sent_at.pop(key, None)) is not None:
                self.latencies.append(time.perf_counter() - at)

    def send(self, *, timed: bool = False) -> None:
        key = f"{id(self)}-{next(self._ids)}"
        if timed:
            self.sent_at[key] = time.perf_counter()
        self.transport.send(
            WSMsgType.TEXT, SEND_FRAME % (key.encode(), self.chat_id.encode(), CONTENT)
        )


async def connect(
    url: str, token: str | None, cursors: Cursors, made: type[Client] = Client
) -> Any:
    """A connection to a node (resumed, so that it is live in the chats of its cursors)
    or to the peer.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else None
    _, client = await ws_connect(
        made, url, extra_headers=headers, max_frame_size=1 << 20, logger_name="bench"
    )
    assert isinstance(client, Client)
    if token:
        client.transport.send(
            WSMsgType.TEXT, json.dumps({"type": "resume", "payload": {"cursors": cursors}}).encode()
        )
        await client.resumed
    return client


async def connect_many(
    url: str, tokens: Sequence[str | None], cursors: Cursors | None = None
) -> list[Client]:
    clients: list[Client] = []
    for start in range(0, len(tokens), 100):
        clients += await asyncio.gather(
            *(connect(url, token, cursors or {}) for token in tokens[start : start + 100])
        )
    return clients


async def disconnect(clients: Sequence[Client | Bare]) -> None:
    for client in clients:
        if isinstance(client, Bare):
            client.transport.abort()
        else:
            client.transport.disconnect(False)
    await asyncio.sleep(0.1)


class Bare(asyncio.Protocol):
    """One connection that comes in and stays, for as little processor time as it can:
    the load shares the machine with the server. It sends constants (masked with zeros,
    which leaves them as they are), and what it need not read it passes over. Anything
    that it does not expect is counted as an error.
    """

    def __init__(self, url: str, token: str, cursors: Cursors) -> None:
        parts = urlsplit(url)
        self._upgrade = (
            f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: Upgrade\r\nUpgrade:"
            " websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key:"
            f" {'A' * 22}==\r\nAuthorization: Bearer {token}\r\n\r\n"
        )
        self._resume = _client_frame(
            json.dumps({"type": "resume", "payload": {"cursors": cursors}}).encode()
        )
        self._unread = b""
        self.transport: asyncio.Transport
        self.resumed = asyncio.get_running_loop().create_future()
        self.errors = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._upgrade.encode())

    def connection_lost(self, error: Exception | None) -> None:
        if not self.resumed.done():
            self.resumed.set_exception(ConnectionError(f"not let in: {self._unread!r}"))

    def data_received(self, data: bytes) -> None:
        if not self.resumed.done() and data.startswith(b"HTTP/1.1 101"):
            data = data[data.index(b"\r\n\r\n") + 4 :]
        data = self._unread + data
        at = 0
        while len(data) >= at + 4:
            size, start = data[at + 1], at + 2
            if size == 126:
                size, start = data[at + 2] << 8 | data[at + 3], at + 4
            if len(data) < start + size:
                break
            at = start + size
            self._frame(data, start, at)
        self._unread = data[at:]

    def _frame(self, data: bytes, start: int, end: int) -> None:
        frame = data[start:end]
        if frame.startswith(b'{"type":"heartbeat"'):
            self.transport.write(_client_frame(b'{"type":"heartbeat_ack"}'))
        elif frame.startswith(b'{"type":"connection_established"'):
            self.transport.write(self._resume)
        elif frame.startswith(b'{"type":"resumed"'):
            self.resumed.set_result(None)
        elif not frame.startswith(b'{"type":"presence"'):
            self.errors += 1


async def crowd(url: str, tokens: Sequence[str]) -> list[Bare]:
    """Everybody comes, ``AT_ONCE`` at a time: as one is in, the next knocks."""
    loop, address, left = asyncio.get_running_loop(), urlsplit(url), iter(tokens)
    came: list[Bare] = []

    async def come() -> None:
        for token in left:
            bare = Bare(url, token, {})
            await loop.create_connection(lambda bare=bare: bare, address.hostname, address.port)
            await bare.resumed
            came.append(bare)

    await asyncio.gather(*(come() for _ in range(AT_ONCE)))
    return came


class Sender(Bare):
    """One connection that keeps ``window`` sends open.

    A send is a frame made of constants and a number; what one read answers leaves in
    one write. Every ack is checked: it is of the oldest open send, new, and of the next
    sequence of the chat. So is the message that follows it: its sequence.
    """

    def __init__(self, url: str, token: str, chat_id: str, head: int) -> None:
        super().__init__(url, token, {chat_id: (1, head)})
        start = b'{"type":"send_message","payload":{"client_message_id":"'
        rest = b'","chat_id":"%b","content":"%b"}}' % (chat_id.encode(), CONTENT)
        whole = _client_frame(start + NUMBER % 0 + rest)
        self._before, self._behind = whole[: -len(NUMBER % 0 + rest)], rest
        self._head = head
        self.window = 0
        self.sent = self.acks = self.messages = 0

    def data_received(self, data: bytes) -> None:
        before = self.acks
        super().data_received(data)
        if self.window and self.acks > before:
            self.send(self.acks - before)

    def _frame(self, data: bytes, start: int, end: int) -> None:
        if data.startswith(ACK, start):
            self._acked(data, start)
        elif data.startswith(MESSAGE, start):
            self._got(data, start)
        else:
            super()._frame(data, start, end)

    def _acked(self, data: bytes, start: int) -> None:
        start += len(ACK)
        sequence = data.index(SEQUENCE, start) + len(SEQUENCE)
        right = (
            data.startswith(NUMBER % self.acks, start)
            and data.startswith(b"%d," % (self._head + self.acks + 1), sequence)
            and data.startswith(NEW, data.index(NEW[:5], sequence))
        )
        self.acks += 1
        self.errors += not right

    def _got(self, data: bytes, start: int) -> None:
        self.messages += 1
        sequence = data.index(SEQUENCE, start) + len(SEQUENCE)
        self.errors += not data.startswith(b"%d," % (self._head + self.messages), sequence)

    def send(self, count: int) -> None:
        first, self.sent = self.sent, self.sent + count
        before, behind = self._before, self._behind
        self.transport.write(
            b"".join([before + NUMBER % number + behind for number in range(first, self.sent)])
        )


def _client_frame(payload: bytes) -> bytes:
    size = len(payload)
    length = bytes((0x80 | size,)) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return b"\x81" + length + b"\0\0\0\0" + payload


class Senders:
    """Connections of people who write, each in its own chat, with a few sends open."""

    def __init__(self, child: Child, senders: Sequence[Sender], in_flight: int) -> None:
        self._child = child
        self._senders = senders
        self._in_flight = in_flight

    @classmethod
    async def gather(
        cls,
        child: Child,
        url: str,
        connections: int,
        in_flight: int,
        stored: int = 0,
        first: int = 0,
    ) -> Senders:
        """Users from number ``first`` on. The first one's chat holds ``stored``
        messages already.
        """
        people = {"first": first, "count": connections}
        tokens = ask(child, do="mint", **people)["tokens"]
        chat_ids = ask(child, do="own_chats", **people)["chat_ids"]
        ask(child, do="store", chat_id=chat_ids[0], count=stored)
        heads = [stored] + [0] * (connections - 1)
        loop, address = asyncio.get_running_loop(), urlsplit(url)
        senders = [Sender(url, *mine) for mine in zip(tokens, chat_ids, heads, strict=True)]
        for sender in senders:
            await loop.create_connection(
                lambda sender=sender: sender, address.hostname, address.port
            )
        await asyncio.gather(*(sender.resumed for sender in senders))
        return cls(child, senders, in_flight)

    async def load(
        self, seconds: float, others: Callable[[], Sequence[float]] = tuple
    ) -> dict[str, Any]:
        """Sends acknowledged per second, processor microseconds per send of the server
        and of this load, and the mean group. ``others`` gives the processor seconds of
        other processes, whose microseconds per send are found as well.
        """
        formed = self._formed()  # costs the server too: not while it is measured
        for sender in self._senders:
            sender.window = self._in_flight
            sender.send(self._in_flight)
        await asyncio.sleep(0.25)
        used, beside = self._used(), others()
        acks, spent, began = self._acks, time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        spent, took = time.process_time() - spent, time.perf_counter() - began
        done, used = self._acks - acks, self._used() - used
        beside = [now - then for now, then in zip(others(), beside, strict=True)]
        for sender in self._senders:
            sender.window = 0
        while any(s.messages < s.sent and not s.errors for s in self._senders):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # ends with the last answer and the last message
        wrong = sum(sender.errors for sender in self._senders)
        assert done and not wrong, f"{wrong} sends were refused or wrongly answered"
        sends, groups = (now - then for now, then in zip(self._formed(), formed, strict=True))
        return {
            "per_s": done / took,
            "cpu_us": used / done * 1e6,
            "load_us": spent / done * 1e6,
            "group": sends / groups,
            "others_us": [spent / done * 1e6 for spent in beside],
        }

    def _used(self) -> float:
        """Processor seconds of the server."""
        return cpu_seconds(self._child.pid)

    def _formed(self) -> tuple[float, float]:
        """Sends and groups so far."""
        formed = ask(self._child, do="groups")
        return formed["sends"], formed["groups"]

    @property
    def _acks(self) -> int:
        return sum(sender.acks for sender in self._senders)


class Audience:
    """Many connections to one server, and the server's processor time per delivery.

    Nobody reads before every connection has something to read. A reader on the same
    machine that waits for its socket is woken by the write, at the writer's expense,
    and how often depends on how the scheduler places the two: once in eight deliveries
    of ours, once in five hundred of the peer's (measured), though both write as often.
    """

    def __init__(self, child: Child, clients: list[Client], order: dict[str, Any]) -> None:
        self._child = child
        self._clients = clients
        self._order = order
        self._sockets = select.poll()
        for client in clients:
            self._sockets.register(
                client.transport.underlying_transport.get_extra_info("socket"), select.POLLIN
            )

    async def per_delivery(self, messages: int, together: int) -> float:
        """Microseconds of the server's loop per delivered message."""
        loop = asyncio.get_running_loop()
        total = len(self._clients)
        before = ask(self._child, do="used")["loop_cpu"]
        for _ in range(messages // together):
            missing = total * together
            everybody = loop.create_future()

            def got() -> None:
                nonlocal missing
                missing -= 1
                if not missing:
                    everybody.set_result(None)  # noqa: B023

            for client in self._clients:
                client.on_frame = got
            ask(self._child, do="send", together=together, **self._order)
            end = time.monotonic() + ARRIVAL_SECONDS_MAX
            while len(self._sockets.poll(0)) < total and time.monotonic() < end:
                time.sleep(0.001)  # noqa: ASYNC251  # not for the loop, which would read
            await asyncio.wait_for(everybody, ARRIVAL_SECONDS_MAX)
        used = ask(self._child, do="used")["loop_cpu"] - before
        return used / (messages * total) * 1e6
