"""The message path beside its peers: sends, fanout, idle connections, latency, and costs that must stay flat.

    python bench/messaging.py [--quick] [--json] [--only sends,fanout,idle,latency,flat,soak]

- sends: acknowledged sends per second over WebSocket, synchronous=FULL, against the same server committing one by
  one and against the store alone at the group size the server formed;
- fanout: the server's processor time per delivery, 1 → 1,000 connections, against the websockets library's broadcast;
- idle: the server's memory per idle authenticated connection;
- latency: send → ack at 1,000 sends a second;
- flat: the cost per send and per delivery at 10 × the chats, members elsewhere and stored messages;
- soak: memory over ten minutes of traffic (only when named).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import uvloop
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

import store as store_bench
from harness import arguments, finish, interleaved, median, percentile, process, say, tell

PARTS = ("sends", "fanout", "idle", "latency", "flat")
CHILDREN = str(Path(__file__).with_name("children.py"))
ONE_BY_ONE = {"durability.intake.max_group_sends": 1}
CONTENT = "x" * 100

Child = subprocess.Popen[str]


class Client(WSListener):
    """One connection of the load: counts what it gets, and keeps ``window`` sends open when told to."""

    def __init__(self) -> None:
        self.frames = 0
        self.acks = 0
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
            self.acks += 1
            if self.latencies is not None and self.sent_at:
                key = data[data.index(b'"client_message_id":"') + 21 :].split(b'"', 1)[0].decode()
                if (at := self.sent_at.pop(key, None)) is not None:
                    self.latencies.append(time.perf_counter() - at)
            if self.window:
                self.send()
        elif data.startswith(b'{"type":"message"'):
            self.frames += 1
            self.on_frame()
        elif data.startswith(b'{"type":"heartbeat"'):
            transport.send(WSMsgType.TEXT, b'{"type":"heartbeat_ack"}')
        elif data.startswith(b'{"type":"resumed"') and not self.resumed.done():
            self.resumed.set_result(None)

    def send(self, *, timed: bool = False) -> None:
        key = f"{id(self)}-{next(self._ids)}"
        if timed:
            self.sent_at[key] = time.perf_counter()
        self.transport.send(
            WSMsgType.TEXT,
            b'{"type":"send_message","payload":{"client_message_id":"%b","chat_id":"%b","content":"%b"}}'
            % (key.encode(), self.chat_id.encode(), CONTENT.encode()),
        )


Cursors = dict[str, tuple[int, int]]


async def connect(url: str, token: str | None, cursors: Cursors) -> Client:
    """A connection to a node (resumed, so that it is live in its chats) or to the peer."""
    headers = {"Authorization": f"Bearer {token}"} if token else None
    _, client = await ws_connect(Client, url, extra_headers=headers, max_frame_size=1 << 20, logger_name="bench")
    assert isinstance(client, Client)
    if token:
        client.transport.send(WSMsgType.TEXT, json.dumps({"type": "resume", "payload": {"cursors": cursors}}).encode())
        await client.resumed
    return client


async def connect_many(url: str, tokens: list[str] | list[None], cursors: Cursors | None = None) -> list[Client]:
    clients: list[Client] = []
    for start in range(0, len(tokens), 100):
        clients += await asyncio.gather(*(connect(url, token, cursors or {}) for token in tokens[start : start + 100]))
    return clients


async def disconnect(clients: list[Client]) -> None:
    for client in clients:
        client.transport.disconnect(False)
    await asyncio.sleep(0.1)


# --- sends ------------------------------------------------------------------------------------------------


def sends_per_second(settings: dict[str, Any], seconds: float, connections: int = 64) -> tuple[float, float]:
    """Acknowledged sends per second, and the mean group the server formed."""

    async def load(child: Child, url: str) -> tuple[float, float]:
        tokens = tell(child, do="mint", count=connections)["tokens"]
        chats = [tell(child, do="create", first=n, count=1)["chat_id"] for n in range(connections)]
        clients = await connect_many(url, tokens)
        for client, chat_id in zip(clients, chats, strict=True):
            client.chat_id, client.window = chat_id, 16
            for _ in range(client.window):
                client.send()
        await asyncio.sleep(0.5)
        before, began = sum(c.acks for c in clients), time.perf_counter()
        await asyncio.sleep(seconds)
        done, took = sum(c.acks for c in clients) - before, time.perf_counter() - began
        for client in clients:
            client.window = 0
        formed = tell(child, do="groups")
        await disconnect(clients)
        return done / took, formed["sum"] / formed["count"]

    with process(CHILDREN, "node", json.dumps(settings)) as (child, hello):
        return uvloop.run(load(child, hello["url"]))


def measure_sends(report: Report, *, quick: bool) -> None:
    rounds, seconds = (1, 2.0) if quick else (5, 4.0)
    groups: list[float] = []

    def grouped() -> float:
        rate, formed = sends_per_second({}, seconds)
        groups.append(formed)
        return rate

    together, alone = interleaved(rounds, grouped, lambda: sends_per_second(ONE_BY_ONE, seconds)[0])
    size = max(1, round(median(groups)))
    stores = [store_bench.measure(size, 1.0 if quick else 3.0)["sends_per_second"] for _ in range(rounds)]
    report.figures["sends_per_s"] = median(together)
    report.figures["sends_one_by_one_per_s"] = median(alone)
    report.figures["store_alone_per_s"] = median(stores)
    report.figures["group_formed"] = size
    report.ratios["sends_vs_one_by_one"] = median(together) / median(alone)
    report.ratios["sends_vs_store"] = median(together) / median(stores)


# --- fanout -----------------------------------------------------------------------------------------------


class Audience:
    """Many connections to one server, and the server's processor time per delivery."""

    def __init__(self, child: Child, clients: list[Client], order: dict[str, Any]) -> None:
        self._child = child
        self._clients = clients
        self._order = order

    async def per_delivery(self, messages: int, together: int) -> float:
        """Microseconds of the server's processor for each message that reached each connection."""
        loop = asyncio.get_running_loop()
        total = len(self._clients)
        before = tell(self._child, do="cpu")["cpu"]
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
        used = tell(self._child, do="cpu")["cpu"] - before
        return used / (messages * total) * 1e6


def measure_fanout(report: Report, *, quick: bool) -> None:
    rounds, messages, size = (5, 32, 1000) if quick else (5, 160, 1000)
    with process(CHILDREN, "node") as (node, hello), process(CHILDREN, "websockets") as (peer, peer_hello):

        async def measure() -> dict[str, list[float]]:
            tokens = tell(node, do="mint", count=size)["tokens"]
            chat = tell(node, do="create", first=0, count=size)
            members = await connect_many(hello["url"], tokens, {chat["chat_id"]: (1, chat["head"])})
            ours = Audience(node, members, {"chat_id": chat["chat_id"]})
            clients = await connect_many(peer_hello["url"], [None] * size)
            # The same bytes that our clients get.
            text = json.dumps({"type": "message", "payload": {"padding": "x" * 370}}, separators=(",", ":"))
            theirs = Audience(peer, clients, {"text": text})
            results: dict[str, list[float]] = {name: [] for name in ("our_1", "their_1", "our_16", "their_16")}
            await ours.per_delivery(16, 16)
            await theirs.per_delivery(16, 16)
            for _ in range(rounds):
                results["our_1"].append(await ours.per_delivery(messages, 1))
                results["their_1"].append(await theirs.per_delivery(messages, 1))
                results["our_16"].append(await ours.per_delivery(messages, 16))
                results["their_16"].append(await theirs.per_delivery(messages, 16))
            return results

        results = uvloop.run(measure())
    for name, values in results.items():
        report.figures[f"fanout_{name}_us"] = median(values)
    single = [t / o for o, t in zip(results["our_1"], results["their_1"], strict=True)]
    burst = [t / o for o, t in zip(results["our_16"], results["their_16"], strict=True)]
    report.ratios["fanout_single_vs_websockets"] = median(single)
    report.ratios["fanout_burst_vs_websockets"] = median(burst)


# --- idle connections -------------------------------------------------------------------------------------


def measure_idle(report: Report, *, quick: bool) -> None:
    size = 5000

    async def load(child: Child, url: str) -> float:
        tokens = tell(child, do="mint", count=size)["tokens"]
        tell(child, do="create", first=0, count=90)
        warm = await connect_many(url, tokens[:200])
        await disconnect(warm)
        await asyncio.sleep(0.5)
        before = tell(child, do="cpu")["rss"]
        clients = await connect_many(url, tokens)
        await asyncio.sleep(1)
        after = tell(child, do="cpu")["rss"]
        await disconnect(clients)
        return (after - before) / size / 1024

    with process(CHILDREN, "node") as (child, hello):
        report.figures["idle_connection_kb"] = uvloop.run(load(child, hello["url"]))


# --- latency ----------------------------------------------------------------------------------------------


def measure_latency(report: Report, *, quick: bool) -> None:
    seconds, per_second, connections = (4.0 if quick else 20.0), 1000, 100

    async def load(child: Child, url: str) -> list[float]:
        tokens = tell(child, do="mint", count=connections)["tokens"]
        chats = [tell(child, do="create", first=n, count=5)["chat_id"] for n in range(0, connections, 5)]
        clients = await connect_many(url, tokens)
        for index, client in enumerate(clients):
            client.chat_id = chats[index // 5]
        loop = asyncio.get_running_loop()
        began = loop.time()
        for n in range(int(seconds * per_second)):
            due = began + n / per_second
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            clients[n % connections].send(timed=True)
        await asyncio.sleep(0.5)
        latencies = [value for client in clients for value in client.latencies]
        await disconnect(clients)
        return latencies

    with process(CHILDREN, "node") as (child, hello):
        latencies = uvloop.run(load(child, hello["url"]))
    report.figures["send_ack_p50_ms"] = percentile(latencies, 50) * 1000
    report.figures["send_ack_p99_ms"] = percentile(latencies, 99) * 1000


@dataclass
class Report:
    figures: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)


MEASURES: dict[str, Callable[..., None]] = {
    "sends": measure_sends,
    "fanout": measure_fanout,
    "idle": measure_idle,
    "latency": measure_latency,
}


def main() -> None:
    options = arguments(__doc__ or "", PARTS)
    report = Report()
    for name in options.only.split(","):
        if name in MEASURES:
            say(f"measuring {name} …")
            MEASURES[name](report, quick=options.quick)
    finish("messaging", report.figures, report.ratios, as_json=options.json)


if __name__ == "__main__":
    main()
