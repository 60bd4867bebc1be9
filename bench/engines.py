"""Nodes of a cluster, on a real PostgreSQL and Redis, beside the embedded server.

    python bench/engines.py [--quick] [--json] [--only PARTS]

- sends: acknowledged sends per second over WebSocket of a node on PostgreSQL against an
  embedded one, under the load of `messaging.py` (128 connections, 16 sends open each);
  the processor time per send of the node, of PostgreSQL and of Redis; and what an entry
  costs another node that reads the log for nobody (``feed_cpu_us``: all that this node
  takes; ``idle_node_cpu_ms_per_s`` of it is there without a send). Then half of that
  load on each of two nodes: ``two_gateways_vs_one`` is the processor time per send of
  the one node against that of the two, each of which reads the other's messages too;
- cross: from a send at one node to the message at another, 200 sends a second; and to
  the sender's own message, which is the commit's part of it. The processor time of
  PostgreSQL for a send that is alone in its group, two readers included. Then what the
  disk takes for one sync, with nothing else;
- kill: three nodes whose people write in one chat; one node is killed. The longest time
  in which a person at another node has no send acknowledged;
- idle (with --quick only when named): memory per idle connection of a node, and the
  processor time of node, PostgreSQL and Redis for each that comes in and for each
  heartbeat;
- hot, groups (with --quick only when named): the store alone; see `engines_store.py`.

All measures of a part are taken in turn, and the median counts. Node, PostgreSQL and
load share the machine: read processor times and ratios. docs/internals/speed.md says
where the time goes.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import uvloop
from picows import WSFrame, WSMsgType, WSTransport

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

import engines_store as store_alone  # noqa: E402
from clients import (  # noqa: E402
    ACK,
    MESSAGE,
    SEND_FRAME,
    Client,
    Senders,
    connect,
    disconnect,
)
from engines import Missing, Server, postgres, redis  # noqa: E402
from harness import (  # noqa: E402
    Child,
    arguments,
    ask,
    cpu_seconds,
    finish,
    median,
    percentile,
    process,
    processes,
    say,
)
from messaging import (  # noqa: E402
    CHILDREN,
    CONNECTIONS,
    IN_FLIGHT,
    idle_load,
    ratio,
    sync_seconds,
)

QUICK_PARTS = ("sends", "cross", "kill", "hot")
PARTS = (*QUICK_PARTS, "idle", "groups")
IDLE_SECONDS = 2.0
PER_SECOND = 200
FIRST_OF_KILL = 1_000
"""The users of that part have numbers from here on."""
TALK_SECONDS = 0.01
AFTER_KILL_SECONDS = 2.0
BEAT_SECONDS, BEATS = 4.0, 2
"""Heartbeats of idle connections; they are 30 s apart by default."""
SENT_AT = re.compile(rb'"content":"([0-9.]+)"')
Figures = dict[str, float]


@dataclass(frozen=True)
class Cluster:
    """The engines, and the settings of a node on them."""

    database: Server
    redis: Server
    settings: dict[str, Any]

    @property
    def node(self) -> tuple[str, ...]:
        """The command of a node."""
        return (CHILDREN, "node", json.dumps(self.settings))

    def cpu_seconds(self) -> tuple[float, float]:
        """Of PostgreSQL and of Redis so far."""
        return self.database.cpu_seconds(), self.redis.cpu_seconds()


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Raises Missing without PostgreSQL or Redis."""
    with ExitStack() as stack:
        database = postgres.start(max_connections="300")
        stack.callback(database.stop)
        shared = redis.start()
        stack.callback(shared.stop)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-")))
        keys = folder / "token.keys"
        keys.touch(0o600)
        keys.write_text("the same key on every node, 32 bytes or more\n")
        settings = {
            "cluster.postgres": database.url,
            "cluster.redis": shared.url,
            "access.tokens.secret_file": str(keys),
        }
        yield Cluster(database, shared, settings)


# --- sends
# ------------------------------------------------------------------------------------


def measure_sends(cluster: Cluster, quick: bool, figures: Figures, ratios: Figures) -> None:
    rounds, seconds = (5, 0.6) if quick else (7, 3.0)
    # The first to start has the leases: it also reads the log for webhooks, as one node
    # of a cluster does.
    with processes((CHILDREN, "node"), cluster.node) as nodes, process(*cluster.node) as last:
        idle, taken = uvloop.run(_sends(cluster, [*nodes, last], rounds, seconds))
    embedded, one, two = zip(*taken, strict=True)

    def of(loads: Sequence[dict[str, Any]], name: str) -> list[float]:
        return [load[name] for load in loads]

    reader, server, counters = zip(*of(one, "others_us"), strict=True)
    figures["embedded_sends_per_s"] = median(of(embedded, "per_s"))
    figures["embedded_send_cpu_us"] = median(of(embedded, "cpu_us"))
    figures["pg_sends_per_s"] = median(of(one, "per_s"))
    figures["pg_group_formed"] = median(of(one, "group"))
    figures["pg_send_cpu_us"] = median(of(one, "cpu_us"))
    figures["pg_server_cpu_us"] = median(server)
    figures["redis_send_cpu_us"] = median(counters)
    figures["feed_cpu_us"] = median(reader)
    figures["idle_node_cpu_ms_per_s"] = idle * 1000
    figures["two_gateways_cpu_us"] = median(of(two, "cpu_us"))
    ratios["pg_sends_vs_sqlite"] = ratio(of(one, "per_s"), of(embedded, "per_s"))
    ratios["two_gateways_vs_one"] = ratio(of(one, "cpu_us"), of(two, "cpu_us"))


async def _sends(
    cluster: Cluster, nodes: Sequence[tuple[Child, Any]], rounds: int, seconds: float
) -> tuple[float, list[tuple[dict[str, Any], ...]]]:
    """The processor seconds per second of a node that has nothing to do; and, in each
    round, the loads of the embedded node, of one of the cluster's, and of both of them
    with half of it each.
    """
    alone, first, second = nodes

    def others() -> tuple[float, ...]:
        return (cpu_seconds(second[0].pid), *cluster.cpu_seconds())

    half = CONNECTIONS // 2
    embedded, one, *halves = [
        await Senders.gather(child, hello["url"], count, IN_FLIGHT, first=number)
        for (child, hello), count, number in (
            (alone, CONNECTIONS, 0),
            (first, CONNECTIONS, 0),
            (first, half, CONNECTIONS),
            (second, half, CONNECTIONS + half),
        )
    ]

    async def both() -> dict[str, Any]:
        loads = await asyncio.gather(*(each.load(seconds) for each in halves))
        per_s = sum(load["per_s"] for load in loads)
        cpu = sum(load["cpu_us"] * load["per_s"] for load in loads)
        return {"per_s": per_s, "cpu_us": cpu / per_s}

    async def a_round() -> tuple[dict[str, Any], ...]:
        return await embedded.load(seconds), await one.load(seconds, others), await both()

    await a_round()  # interpreters and plans that have seen it before
    used = others()[0]
    await asyncio.sleep(IDLE_SECONDS)
    idle = (others()[0] - used) / IDLE_SECONDS
    return idle, [await a_round() for _ in range(rounds)]


# --- cross, kill
# ------------------------------------------------------------------------------------


class Talker(Client):
    """A person whose messages say when they were sent."""

    def __init__(self) -> None:
        super().__init__()
        self.acked_at: list[float] = []
        self.transits: list[float] = []
        """Seconds from the sends of others to their messages here."""
        self.says = 0

    def say(self) -> None:
        self.says += 1
        key, moment = b"%d-%d" % (id(self), self.says), b"%.6f" % time.perf_counter()
        self.transport.send(WSMsgType.TEXT, SEND_FRAME % (key, self.chat_id.encode(), moment))

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        data = frame.get_payload_as_bytes()
        if data.startswith(ACK):
            self.acked_at.append(time.perf_counter())
        elif data.startswith(MESSAGE) and (sent := SENT_AT.search(data)):
            self.transits.append(time.perf_counter() - float(sent[1]))
        else:
            super().on_ws_frame(transport, frame)


async def talkers(nodes: Sequence[tuple[Child, Any]], first: int) -> list[Talker]:
    """One at each node, in a chat of their own; users from number ``first`` on."""
    people = {"first": first, "count": len(nodes)}
    chat_id = ask(nodes[0][0], do="create", **people)["chat_id"]
    tokens = ask(nodes[0][0], do="mint", **people)["tokens"]
    made = []
    for (_, hello), token in zip(nodes, tokens, strict=True):
        talker = await connect(hello["url"], token, {chat_id: (1, 0)}, Talker)
        talker.chat_id = chat_id
        made.append(talker)
    return made


def measure_cross(
    cluster: Cluster, nodes: Sequence[tuple[Child, Any]], quick: bool, figures: Figures
) -> None:
    seconds, pairs = (4.0 if quick else 30.0), 20

    async def measure() -> tuple[list[float], list[float]]:
        people = [await talkers(nodes, 2 * number) for number in range(pairs)]
        began, used = time.perf_counter(), cluster.cpu_seconds()[0]
        for n in range(int(seconds * PER_SECOND)):
            await asyncio.sleep(max(0.0, began + n / PER_SECOND - time.perf_counter()))
            people[n % pairs][0].say()
        await asyncio.sleep(0.5)
        used = cluster.cpu_seconds()[0] - used
        figures["lone_send_server_cpu_us"] = used / (n + 1) * 1e6
        await disconnect([talker for pair in people for talker in pair])
        own, others = [
            [seconds for talker in talkers for seconds in talker.transits]
            for talkers in zip(*people, strict=True)
        ]
        assert len(others) == n + 1, f"{n + 1 - len(others)} messages did not arrive"
        return own, others

    for name, transits in zip(("own", "cross"), uvloop.run(measure()), strict=True):
        figures[f"{name}_node_p50_ms"] = percentile(transits, 50) * 1000
        figures[f"{name}_node_p99_ms"] = percentile(transits, 99) * 1000
    syncs = sync_seconds(400)
    figures["disk_sync_p50_ms"] = percentile(syncs, 50) * 1000
    figures["disk_sync_p99_ms"] = percentile(syncs, 99) * 1000


def measure_kill(
    cluster: Cluster, nodes: Sequence[tuple[Child, Any]], quick: bool, figures: Figures
) -> None:
    kills, pauses = 2 if quick else 10, list[float]()

    async def measure(nodes: Sequence[tuple[Child, Any]], first: int) -> float:
        people = await talkers(nodes, first)
        talking = [asyncio.create_task(_talk(talker)) for talker in people]
        await asyncio.sleep(0.5)
        nodes[-1][0].kill()
        killed = time.perf_counter()
        await asyncio.sleep(AFTER_KILL_SECONDS)
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
        await disconnect(people[:-1])
        return max(_pause(talker, killed) for talker in people[:-1])

    for number in range(kills):
        with process(*cluster.node) as victim:
            first = FIRST_OF_KILL + 3 * number
            pauses.append(uvloop.run(measure([*nodes, victim], first)))
    figures["node_kill_pause_s"] = max(pauses)


async def _talk(talker: Talker) -> None:
    while True:
        talker.say()
        await asyncio.sleep(TALK_SECONDS)


def _pause(talker: Talker, killed: float) -> float:
    """The longest time without an ack from just before the kill to now."""
    moments = [*talker.acked_at, time.perf_counter()]
    return max(later - earlier for earlier, later in pairwise(moments) if later > killed)


# --- idle
# ------------------------------------------------------------------------------------


def measure_idle(cluster: Cluster, figures: Figures) -> None:
    def others() -> tuple[float, ...]:
        memory = psutil.Process(cluster.redis.pid).memory_info().rss
        return (*cluster.cpu_seconds(), memory)

    beats = {"gateway.timeouts.heartbeat_interval_seconds": BEAT_SECONDS}
    with process(*replace(cluster, settings={**cluster.settings, **beats}).node) as (child, hello):
        idle = uvloop.run(idle_load(child, hello["url"], others, BEATS * BEAT_SECONDS))
    server, counters, memory = idle["others"]
    figures["idle_connection_kb"] = idle["kb"]
    figures["connect_cpu_us"] = idle["cpu_us"]
    figures["connect_server_cpu_us"] = server * 1e6
    figures["connect_redis_cpu_us"] = counters * 1e6
    figures["connection_redis_kb"] = memory / 1024
    for name, seconds in zip(("", "server_", "redis_"), idle["stay"], strict=False):
        figures[f"heartbeat_{name}cpu_us"] = seconds / BEATS * 1e6


def main() -> None:
    args = arguments(__doc__ or "", PARTS)
    quick, is_default = args.quick, args.only == ",".join(PARTS)
    chosen = QUICK_PARTS if quick and is_default else args.only.split(",")
    figures: Figures = {}
    ratios: Figures = {}
    try:
        with cluster() as engines, ExitStack() as stack:
            if "sends" in chosen:
                measure_sends(engines, quick, figures, ratios)
            if {"cross", "kill"} & set(chosen):
                with processes(engines.node, engines.node) as nodes:
                    if "cross" in chosen:
                        measure_cross(engines, nodes, quick, figures)
                    if "kill" in chosen:
                        measure_kill(engines, nodes, quick, figures)
            if "idle" in chosen:
                measure_idle(engines, figures)
            runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
            if "groups" in chosen:
                runner.run(store_alone.by_group(engines.database, quick, figures, ratios))
            if "hot" in chosen:
                runner.run(store_alone.hot_chat(engines.database, quick, ratios))
    except Missing as error:
        say(f"nothing can be measured: {error}")
        return
    finish("engines", figures, ratios, as_json=args.json)


if __name__ == "__main__":
    main()
