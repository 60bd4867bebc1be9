"""The load that `messaging.py` puts on a server: connections that send, count, and wait for everybody."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from harness import Child, tell

CONTENT = b"x" * 100
Cursors = dict[str, tuple[int, int]]


class Client(WSListener):
    """One connection of the load: counts what it gets, and keeps ``window`` sends open when told to."""

    def __init__(self) -> None:
        self.frames = 0
        self.acks = 0
        self.open = 0
        self.errors = 0
        self.transport: WSTransport
        self.window = 0
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
        elif data.startswith(b'{"type":"error"'):
            self.errors += 1
            self.open -= 1

    def _acked(self, data: bytes) -> None:
        self.acks += 1
        self.open -= 1
        if self.sent_at:
            key = data[data.index(b'"client_message_id":"') + 21 :].split(b'"', 1)[0].decode()
            if (at := self.sent_at.pop(key, None)) is not None:
                self.latencies.append(time.perf_counter() - at)
        if self.window:
            self.send()

    def send(self, *, timed: bool = False) -> None:
        self.open += 1
        key = f"{id(self)}-{next(self._ids)}"
        if timed:
            self.sent_at[key] = time.perf_counter()
        self.transport.send(
            WSMsgType.TEXT,
            b'{"type":"send_message","payload":{"client_message_id":"%b","chat_id":"%b","content":"%b"}}'
            % (key.encode(), self.chat_id.encode(), CONTENT),
        )


async def connect(url: str, token: str | None, cursors: Cursors) -> Client:
    """A connection to a node (resumed, so that it is live in the chats of its cursors) or to the peer."""
    headers = {"Authorization": f"Bearer {token}"} if token else None
    _, client = await ws_connect(Client, url, extra_headers=headers, max_frame_size=1 << 20, logger_name="bench")
    assert isinstance(client, Client)
    if token:
        client.transport.send(WSMsgType.TEXT, json.dumps({"type": "resume", "payload": {"cursors": cursors}}).encode())
        await client.resumed
    return client


async def connect_many(url: str, tokens: Sequence[str | None], cursors: Cursors | None = None) -> list[Client]:
    clients: list[Client] = []
    for start in range(0, len(tokens), 100):
        clients += await asyncio.gather(*(connect(url, token, cursors or {}) for token in tokens[start : start + 100]))
    return clients


async def disconnect(clients: Sequence[Client]) -> None:
    for client in clients:
        client.transport.disconnect(False)
    await asyncio.sleep(0.1)


class Senders:
    """Connections of people who write, each in a chat of its own, live in it, with a few sends open."""

    def __init__(self, child: Child, clients: Sequence[Client], in_flight: int) -> None:
        self._child = child
        self._clients = clients
        self._in_flight = in_flight

    @classmethod
    async def gather(cls, child: Child, url: str, connections: int, in_flight: int, stored: int = 0) -> Senders:
        """The first one's chat holds ``stored`` messages already."""
        tokens = tell(child, do="mint", count=connections)["tokens"]
        chat_ids = tell(child, do="own_chats", count=connections)["chat_ids"]
        tell(child, do="store", chat_id=chat_ids[0], count=stored)
        heads = {chat_ids[0]: stored}
        cursors = [{chat_id: (1, heads.get(chat_id, 0))} for chat_id in chat_ids]
        clients = await asyncio.gather(*(connect(url, *pair) for pair in zip(tokens, cursors, strict=True)))
        for client, chat_id in zip(clients, chat_ids, strict=True):
            client.chat_id = chat_id
        return cls(child, clients, in_flight)

    async def load(self, seconds: float) -> dict[str, float]:
        """Sends acknowledged per second, processor microseconds of the server per send, and the mean group."""
        for client in self._clients:
            client.window = self._in_flight
            for _ in range(self._in_flight):
                client.send()
        await asyncio.sleep(0.25)
        acks, before, began = self._acks, tell(self._child, do="used"), time.perf_counter()
        await asyncio.sleep(seconds)
        done, after, took = self._acks - acks, tell(self._child, do="used"), time.perf_counter() - began
        for client in self._clients:
            client.window = 0
        while any(client.open > 0 for client in self._clients):  # noqa: ASYNC110 - ends with the last answer
            await asyncio.sleep(0.01)
        refused = sum(client.errors for client in self._clients)
        assert done and not refused, f"{refused} sends were refused"
        groups = after["groups"] - before["groups"]
        return {
            "per_s": done / took,
            "cpu_us": (after["cpu"] - before["cpu"]) / done * 1e6,
            "group": (after["sends"] - before["sends"]) / groups,
        }

    @property
    def _acks(self) -> int:
        return sum(client.acks for client in self._clients)


class Audience:
    """Many connections to one server, and the server's processor time per delivery."""

    def __init__(self, child: Child, clients: list[Client], order: dict[str, Any]) -> None:
        self._child = child
        self._clients = clients
        self._order = order

    async def per_delivery(self, messages: int, together: int) -> float:
        """Microseconds of the server's loop for each message that reached each connection."""
        loop = asyncio.get_running_loop()
        total = len(self._clients)
        before = tell(self._child, do="used")["loop_cpu"]
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
            tell(self._child, do="send", together=together, **self._order)
            await asyncio.wait_for(everybody, 30)
        used = tell(self._child, do="used")["loop_cpu"] - before
        return used / (messages * total) * 1e6
