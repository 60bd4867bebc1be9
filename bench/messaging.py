"""The message path beside its peers: sends, fanout, idle connections, latency, and
costs that must stay flat.

    python bench/messaging.py [--quick] [--json] [--only PARTS] [--minutes 10]

- sends: acknowledged sends per second over WebSocket, synchronous=FULL, against the
  same server committing one by one and against the store alone at the group size the
  server formed. The load saturates the server: 128 connections, each in a chat of its
  own and live in it (it gets what it sends, too), with 16 sends open. With fewer open
  the groups are smaller and the server reaches less of the store (0.4 at 4 open,
  measured); the server that commits one by one gets one open send each, which is more
  than it can take;
- fanout: processor time per delivery, 1 → 1,000 connections, against the websockets
  library's own broadcast. What is counted is the thread of the event loop, which does
  all of it: log, members, position check, lanes, write. (The commit before it is a
  send's, and the peer has none.) Both run on uvloop, which is the stronger peer;
  without --quick the same broadcast on asyncio's loop is printed beside it;
- idle: the server's memory per idle authenticated connection, at 5,000, and the
  processor time that each took to come in: handshake, token, memberships, resume,
  presence;
- latency: send → ack at 1,000 sends a second, and what one sync of the disk takes at
  that time;
- flat (with --quick only when named): processor time per send and per delivery with 10
  × the chats, the members elsewhere and the messages stored in the chat (100 × without
  --quick), as a ratio to a server with less of it, measured in turn;
- soak: resident memory over minutes of traffic with people coming and going (only when
  named).

Read ratios, not figures: figures are this machine's. docs/internals/speed.md says where
the time goes.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

import store as store_bench
from clients import Audience, Client, Senders, connect, connect_many, crowd, disconnect
from harness import (
    Child,
    arguments,
    ask,
    cores_awake,
    finish,
    median,
    percentile,
    process,
    processes,
    say,
)

QUICK_PARTS = ("sends", "fanout", "idle", "latency")
PARTS = (*QUICK_PARTS, "flat")
CHILDREN = str(Path(__file__).with_name("children.py"))
ONE_BY_ONE = json.dumps({"durability.intake.max_group_sends": 1})
CONNECTIONS, IN_FLIGHT = 128, 16


@dataclass
class Report:
    figures: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    quick: bool
    minutes: float


# --- sends
# ------------------------------------------------------------------------------------


def measure_sends(report: Report, options: Options) -> None:
    rounds, seconds = (5, 0.5) if options.quick else (5, 4.0)
    together: list[dict[str, float]] = []
    alone: list[dict[str, float]] = []
    stores: list[float] = []

    async def measure(nodes: list[tuple[Child, Any]]) -> None:
        servers = [
            await Senders.gather(child, hello["url"], CONNECTIONS, in_flight)
            for (child, hello), in_flight in zip(nodes, (IN_FLIGHT, 1), strict=True)
        ]
        await servers[0].load(seconds)  # an interpreter that has seen the code before
        for _ in range(rounds):
            together.append(await servers[0].load(seconds))
            alone.append(await servers[1].load(seconds))
            group = max(1, round(together[-1]["group"]))
            stored, _ = await asyncio.to_thread(store_bench.measure, group, seconds)
            stores.append(stored)

    with cores_awake(), processes((CHILDREN, "node"), (CHILDREN, "node", ONE_BY_ONE)) as nodes:
        uvloop.run(measure(nodes))
    grouped, single = (
        median([load["per_s"] for load in together]),
        median([load["per_s"] for load in alone]),
    )
    report.figures["sends_per_s"] = grouped
    report.figures["sends_one_by_one_per_s"] = single
    report.figures["store_alone_per_s"] = median(stores)
    report.figures["group_formed"] = median([load["group"] for load in together])
    report.figures["send_cpu_us"] = median([load["cpu_us"] for load in together])
    report.figures["send_load_us"] = median([load["load_us"] for load in together])
    rates = [load["per_s"] for load in together]
    report.ratios["sends_vs_one_by_one"] = ratio(rates, [load["per_s"] for load in alone])
    report.ratios["sends_vs_store"] = ratio(rates, stores)


# --- fanout
# ------------------------------------------------------------------------------------


def measure_fanout(report: Report, options: Options) -> None:
    rounds, messages, size = (5, 16, 1000) if options.quick else (5, 160, 1000)
    loops = ("uvloop",) if options.quick else ("uvloop", "asyncio")
    # As many bytes as our clients get.
    text = json.dumps({"type": "message", "payload": {"padding": "x" * 333}}, separators=(",", ":"))

    async def measure(
        node: tuple[Child, Any], peers: list[tuple[Child, Any]]
    ) -> dict[str, list[float]]:
        tokens = ask(node[0], do="mint", count=size)["tokens"]
        chat = ask(node[0], do="create", first=0, count=size)
        members = await connect_many(node[1]["url"], tokens, {chat["chat_id"]: (1, 0)})
        audiences = {"our": Audience(node[0], members, {"chat_id": chat["chat_id"]})}
        for name, (child, hello) in zip(("their", "their_asyncio"), peers, strict=False):
            audiences[name] = Audience(
                child, await connect_many(hello["url"], [None] * size), {"text": text}
            )
        for audience in audiences.values():
            await audience.per_delivery(16, 16)
        results: dict[str, list[float]] = {}
        for _ in range(rounds):
            for together in (1, 16):
                for name, audience in audiences.items():
                    spent = await audience.per_delivery(messages, together)
                    results.setdefault(f"{name}_{together}", []).append(spent)
        return results

    with processes((CHILDREN, "node"), *((CHILDREN, "websockets", loop) for loop in loops)) as [
        node,
        *peers,
    ]:
        results = uvloop.run(measure(node, peers))
    for name, values in results.items():
        report.figures[f"fanout_{name}_us"] = median(values)
    for name, together in (("single", 1), ("burst", 16)):
        report.ratios[f"fanout_{name}_vs_websockets"] = ratio(
            results[f"their_{together}"], results[f"our_{together}"]
        )


# --- idle connections
# ------------------------------------------------------------------------------------


IDLE = 5_000


async def idle_load(
    child: Child,
    url: str,
    others: Callable[[], Sequence[float]] = tuple,
    stay_seconds: float = 0.0,
) -> dict[str, Any]:
    """Memory per idle connection, and the processor time that each took to come in: of
    the server, of this load, and of ``others`` (see `Senders.load`). ``stay``: what it
    takes the server and the others while all of them stay for so long.
    """
    tokens = ask(child, do="mint", count=IDLE)["tokens"]
    ask(child, do="create", first=0, count=90)
    await disconnect(await crowd(url, tokens[:200]))
    await asyncio.sleep(0.5)
    before, beside, load = ask(child, do="used"), others(), time.process_time()
    clients = await crowd(url, tokens)
    load = time.process_time() - load
    came = ask(child, do="used")
    await asyncio.sleep(1)
    after, beside_now = ask(child, do="used"), others()
    await asyncio.sleep(stay_seconds)
    stayed, beside_later = ask(child, do="used"), others()
    wrong = sum(client.errors for client in clients)
    assert not wrong, f"{wrong} frames that an idle connection does not expect"
    await disconnect(clients)
    return {
        "kb": (after["rss"] - before["rss"]) / IDLE / 1024,
        "cpu_us": (came["cpu"] - before["cpu"]) / IDLE * 1e6,
        "load_us": load / IDLE * 1e6,
        "others": [(now - then) / IDLE for now, then in zip(beside_now, beside, strict=True)],
        "stay": [
            (now - then) / IDLE
            for now, then in zip(
                (stayed["cpu"], *beside_later), (after["cpu"], *beside_now), strict=True
            )
        ],
    }


def measure_idle(report: Report, options: Options) -> None:
    with process(CHILDREN, "node") as (child, hello):
        idle = uvloop.run(idle_load(child, hello["url"]))
    report.figures["idle_connection_kb"] = idle["kb"]
    report.figures["connect_cpu_us"] = idle["cpu_us"]
    report.figures["connect_load_us"] = idle["load_us"]


# --- latency
# ------------------------------------------------------------------------------------


async def paced(clients: list[Client], seconds: float, per_second: int, *, timed: bool) -> None:
    """Sends at an even pace, also if the server is slow to answer."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for n in range(int(seconds * per_second)):
        if (wait := began + n / per_second - loop.time()) > 0:
            await asyncio.sleep(wait)
        clients[n % len(clients)].send(timed=timed)


def sync_seconds(count: int) -> list[float]:
    """How long the disk takes now to make a page durable: the floor of an ack."""
    took = []
    with tempfile.TemporaryFile() as file:
        for _ in range(count):
            file.write(b"x" * 4096)
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return took


def measure_latency(report: Report, options: Options) -> None:
    seconds, connections = (3.0 if options.quick else 20.0), 100

    async def load(child: Child, url: str) -> list[float]:
        tokens = ask(child, do="mint", count=connections)["tokens"]
        chats = [
            ask(child, do="create", first=n, count=5)["chat_id"] for n in range(0, connections, 5)
        ]
        clients = [
            await connect(url, token, {chats[n // 5]: (1, 0)}) for n, token in enumerate(tokens)
        ]
        for index, client in enumerate(clients):
            client.chat_id = chats[index // 5]
        await paced(clients, seconds, 1000, timed=True)
        await asyncio.sleep(0.5)
        latencies = [value for client in clients for value in client.latencies]
        await disconnect(clients)
        return latencies

    with process(CHILDREN, "node") as (child, hello):
        latencies = uvloop.run(load(child, hello["url"]))
    syncs = sync_seconds(200)
    report.figures["disk_sync_p50_ms"] = percentile(syncs, 50) * 1000
    report.figures["disk_sync_p99_ms"] = percentile(syncs, 99) * 1000
    report.figures["send_ack_p50_ms"] = percentile(latencies, 50) * 1000
    report.figures["send_ack_p99_ms"] = percentile(latencies, 99) * 1000


# --- flat
# ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stock:
    """What a server holds beside the traffic that is measured."""

    chats: int = 100
    members: int = 9
    messages: int = 1_000


def stocks(*, quick: bool) -> dict[str, Stock]:
    """By name; the first is what the others are compared with."""
    steps = {
        "base": Stock(),
        "10x_chats": Stock(chats=1_000),
        "10x_members": Stock(members=90),
        "10x_messages": Stock(messages=10_000),
    }
    if not quick:
        steps |= {"100x_chats": Stock(chats=10_000), "100x_messages": Stock(messages=100_000)}
    return steps


def measure_flat(report: Report, options: Options) -> None:
    rounds, seconds, size = (3, 0.4, 100) if options.quick else (7, 1.0, 100)
    steps = stocks(quick=options.quick)
    sends: dict[str, list[float]] = {name: [] for name in steps}
    deliveries: dict[str, list[float]] = {name: [] for name in steps}

    async def measure(nodes: dict[str, tuple[Child, Any]]) -> None:
        servers = {}
        for name, (child, hello) in nodes.items():
            servers[name] = await stocked(child, hello["url"], steps[name], size)
        for _ in range(rounds):
            for name, (senders, audience) in servers.items():
                sends[name].append((await senders.load(seconds))["cpu_us"])
                deliveries[name].append(await audience.per_delivery(32, 1))

    with processes(*[(CHILDREN, "node")] * len(steps)) as nodes:
        uvloop.run(measure(dict(zip(steps, nodes, strict=True))))
    for name in list(steps)[1:]:
        report.figures[f"send_cost_{name}"] = ratio(sends[name], sends["base"])
        report.figures[f"delivery_cost_{name}"] = ratio(deliveries[name], deliveries["base"])


async def stocked(child: Child, url: str, stock: Stock, size: int) -> tuple[Senders, Audience]:
    """Senders and an audience on a server that holds so much else; the messages are in
    the chat of the audience and in the first sender's.
    """
    ask(child, do="elsewhere", chats=stock.chats, members=stock.members)
    # before they come: a chat that is new to them is news
    chat = ask(child, do="create", first=0, count=size)
    ask(child, do="store", chat_id=chat["chat_id"], count=stock.messages)
    senders = await Senders.gather(child, url, 32, 4, stock.messages)
    tokens = ask(child, do="mint", count=size)["tokens"]
    return senders, Audience(
        child, await connect_many(url, tokens, {chat["chat_id"]: (1, stock.messages)}), chat
    )


def ratio(values: list[float], base: list[float]) -> float:
    """Of what was measured in turn, so that a slow minute of the machine is in both."""
    return median([value / other for value, other in zip(values, base, strict=True)])


# --- soak
# ------------------------------------------------------------------------------------


def measure_soak(report: Report, options: Options) -> None:
    """500 sends a second in 20 chats of 10, everybody live, one person a second leaving
    and coming back.

    The page cache is made small, so that everything that is allowed to fill up has done
    so in the first tenth.
    """
    small = json.dumps({"durability.sqlite.cache_bytes": 4 * 1024 * 1024})
    total = options.minutes * 60
    connections = 200

    async def load(child: Child, url: str) -> list[tuple[float, float]]:
        tokens = ask(child, do="mint", count=connections)["tokens"]
        chats = [
            ask(child, do="create", first=n, count=10)["chat_id"] for n in range(0, connections, 10)
        ]

        async def arrive(number: int) -> Client:
            client = await connect(url, tokens[number], {chats[number // 10]: (1, 0)})
            client.chat_id = chats[number // 10]
            return client

        clients = [await arrive(number) for number in range(connections)]
        samples: list[tuple[float, float]] = []
        began = reported = time.monotonic()
        while (now := time.monotonic()) - began < total:
            samples.append((now - began, ask(child, do="used")["rss"] / 1024 / 1024))
            if now - reported >= 10:
                reported = now
                say(f"  {now - began:5.0f} of {total:.0f} s: {samples[-1][1]:.1f} MB")
            await paced(clients, 1.0, 500, timed=False)
            leaver = len(samples) % connections
            await disconnect([clients[leaver]])
            clients[leaver] = await arrive(leaver)
        await disconnect(clients)
        return samples

    with process(CHILDREN, "node", small) as (child, hello):
        samples = uvloop.run(load(child, hello["url"]))
    early = median([rss for at, rss in samples if 0.1 * total <= at < 0.15 * total])
    late = median([rss for at, rss in samples if at >= 0.95 * total])
    report.figures["soak_minutes"] = options.minutes
    report.figures["soak_memory_early_mb"] = early
    report.figures["soak_memory_late_mb"] = late
    report.figures["soak_memory_growth"] = late / early


MEASURES: dict[str, Callable[[Report, Options], None]] = {
    "sends": measure_sends,
    "fanout": measure_fanout,
    "idle": measure_idle,
    "latency": measure_latency,
    "flat": measure_flat,
    "soak": measure_soak,
}


def main() -> None:
    parsed = arguments(__doc__ or "", PARTS, minutes=10.0)
    options = Options(parsed.quick, parsed.minutes)
    report = Report()
    default = parsed.only == ",".join(PARTS)
    for name in QUICK_PARTS if parsed.quick and default else parsed.only.split(","):
        began = time.monotonic()
        MEASURES[name](report, options)
        say(f"measured {name} in {time.monotonic() - began:.1f} s")
    finish("messaging", report.figures, report.ratios, as_json=parsed.json)


if __name__ == "__main__":
    main()
