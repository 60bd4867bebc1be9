"""Streaming AI replies: what Holdfast adds between a model and its client, beside
LiteLLM's proxy before the same model.

- litellm: time to the first token at 1 and 10 replies at once, beyond what the model
  itself takes, and processor time per token with 50 replies of 20 tokens a second; in
  turn with LiteLLM
- lateness: 500 replies of 20 tokens a second: how long a token is under way while all
  of them run, p99; also 1,000
- throughput: tokens a second from a model that does not pause
- waiting: memory of a client that waits, of 5,000
- grant: from the end of a reply to the first token of the next in the queue, p99
- cancel: from a client's leaving to the end of the model's connection, beyond the
  grace, p99
- table: the design document's table under both loads, with failover and without
- pool: Redis time for one operation on a pool of 10,000 active and 10,000 waiting
- log: Redis time and memory for a token of a replicated reply

The model is a process on this machine; each token is the time of its writing. The
peer's ratios are left out if it is not installed.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import uvloop

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from reply_load import (  # noqa: E402
    LoadResult,
    ReplyServer,
    ask,
    burst,
    every,
    usual,
    whole,
)

import streaming_peers  # noqa: E402
import streaming_redis  # noqa: E402
from engines import Missing, redis  # noqa: E402
from harness import (  # noqa: E402
    Child,
    arguments,
    finish,
    median,
    percentile,
    process,
    say,
)
from harness import (  # noqa: E402
    ask as order,
)

PARTS = [
    "litellm", "lateness", "throughput", "waiting", "grant", "cancel", "table", "pool", "log",
]  # fmt: skip
NODE = str(ROOT / "bench" / "streaming_node.py")
UPSTREAM = str(ROOT / "bench" / "streaming_upstream.py")
GRACE_SECONDS = 0.2
WAIT_SECONDS_MAX = 20.0
TURN_SECONDS = 0.9
"""T of the table: how long a reply takes."""
Figures = dict[str, float]


def script(tokens: int, gap: float, first: float = 0.02, number: int = 0) -> str:
    return f"tokens={tokens} gap={gap} first={first} id={number}"


@contextmanager
def node(upstream: str, **settings: Any) -> Iterator[ReplyServer]:
    """A node; ``queue_failover__enabled`` is ``streaming.queue_failover.enabled``."""
    changes = {f"streaming.{name.replace('__', '.')}": v for name, v in settings.items()}
    with process(NODE, upstream, json.dumps(changes)) as (child, ready):
        yield ReplyServer(ready["url"], ready["key"], child.pid)


def cpu_seconds(server: ReplyServer) -> float:
    times = psutil.Process(server.pid).cpu_times()
    return times.user + times.system


async def first_token_ms(server: ReplyServer, at_once: int, rounds: int) -> float:
    """The median from a request to its first token, which the model has after 20 ms."""
    spent = list[float]()
    for _ in range(rounds):
        replies = await every(server, at_once, script(3, 0.005))
        spent += [(reply.first - reply.asked) * 1000 for reply in replies]
    return median(spent)


async def cpu_us_per_token(server: ReplyServer, seconds: float) -> float:
    """Of 50 replies of 20 tokens a second, their beginning and end included."""
    before = cpu_seconds(server)
    replies = await every(server, 50, script(int(seconds * 20), 0.05), spread_seconds=0.5)
    return (cpu_seconds(server) - before) / sum(reply.tokens for reply in replies) * 1e6


async def beside_litellm(quick: bool, upstream: str, figures: Figures, ratios: Figures) -> None:
    rounds, each, seconds = (2, 16, 2.5) if quick else (9, 40, 5.0)
    direct = ReplyServer(upstream, "none")
    with node(upstream) as ours, streaming_peers.litellm(upstream) as peer:
        measured = {"holdfast": ours, "litellm": peer} if peer else {"holdfast": ours}
        overheads: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        for server in measured.values():  # connections, caches
            await first_token_ms(server, 10, 2)
        for _ in range(rounds):
            for at_once in (1, 10):
                times = each if at_once == 1 else each // 4
                base = await first_token_ms(direct, at_once, times)
                for name, server in measured.items():
                    spent = await first_token_ms(server, at_once, times)
                    overheads.setdefault(f"{name}_c{at_once}", []).append(spent - base)
            for name, server in measured.items():
                cpu.setdefault(name, []).append(await cpu_us_per_token(server, seconds))
    for name, values in overheads.items():
        figures[f"ttft_overhead_{name}_ms"] = median(values)
    for name, values in cpu.items():
        figures[f"cpu_us_per_token_{name}"] = median(values)
    if peer:
        both = {
            at_once: median(overheads[f"holdfast_{at_once}"])
            / median(overheads[f"litellm_{at_once}"])
            for at_once in ("c1", "c10")
        }
        ratios.update({f"ttft_overhead_vs_litellm_{c}": value for c, value in both.items()})
        ratios["ttft_overhead_vs_litellm"] = max(both.values())
        ratios["cpu_per_token_vs_litellm"] = median(cpu["holdfast"]) / median(cpu["litellm"])


async def lateness(quick: bool, server: ReplyServer, figures: Figures) -> None:
    """Half of the time they begin one after the other, half of it all of them run."""
    for streams, spread in ((500, 2.0), (1_000, 4.0)):
        seconds = 2 * spread if quick else spread + 10
        replies = await every(server, streams, script(int(seconds * 20), 0.05), spread)
        begun = median([reply.asked for reply in replies]) + spread / 2
        late = [ms * 1000 for reply in replies for at, ms in reply.lateness if at > begun]
        name = "token_lateness" if streams == 500 else f"token_lateness_{streams}"
        figures[f"{name}_p99_ms"] = percentile(late, 99)
        say(f"  {streams} streams: p50 {median(late):.1f} ms, p99 {percentile(late, 99):.1f} ms")


async def throughput(quick: bool, server: ReplyServer, figures: Figures) -> None:
    rates = []
    for _ in range(3):
        replies = await every(server, 32, script(300 if quick else 2_000, 0))
        took = max(r.ended for r in replies) - min(r.first for r in replies)
        rates.append(sum(reply.tokens for reply in replies) / took)
    figures["provider_tokens_per_s"] = median(rates)


async def waiting(quick: bool, upstream: str, figures: Figures) -> None:
    """One reply runs and lets nobody else; then everybody leaves."""
    count = 5_000
    with node(upstream, pool__total=1, queue_failover__waiting_per_tenant=count) as server:
        memory = psutil.Process(server.pid).memory_info
        first = await ask(server, script(1_000, 1), "holder")
        await first.first
        for number in range(20):  # what the first requests of a node need once
            (await ask(server, script(1, 0), f"warm{number}")).transport.abort()
        await asyncio.sleep(0.5)
        before = memory().rss
        clients = [await ask(server, script(1, 0), f"u{number}") for number in range(count)]
        asked = time.monotonic()
        while left := [c.reply for c in clients if c.reply.status != 200]:
            if left[0].status or time.monotonic() > asked + WAIT_SECONDS_MAX:
                raise RuntimeError(f"{len(left)} do not wait: {left[0].failure[-300:]!r}")
            await asyncio.sleep(0.1)  # headers come after 2 s, and the first comment
        figures["waiting_client_kb"] = (memory().rss - before) / count / 1000
        for client in [first, *clients]:
            client.transport.abort()


async def grants(quick: bool, upstream: str, figures: Figures) -> None:
    """Each reply is one token that the model has at once; one runs, the others wait."""
    count = 200 if quick else 1_000
    with node(upstream, pool__total=1, queue_failover__waiting_per_tenant=count) as server:
        replies = await asyncio.gather(
            *(whole(server, script(1, 0, 0), f"u{number}") for number in range(count))
        )
    replies.sort(key=lambda reply: reply.first)
    assert all(reply.succeeded for reply in replies), "a reply failed"
    gaps = [(after.first - before.ended) * 1000 for before, after in pairwise(replies)]
    figures["grant_to_first_token_p99_ms"] = percentile(gaps, 99)


async def cancels(quick: bool, upstream: str, model: Child, figures: Figures) -> None:
    count, left = 50 if quick else 500, dict[int, float]()
    loop = asyncio.get_running_loop()
    with node(upstream, times__cancel_seconds=GRACE_SECONDS) as server:

        async def leave(number: int) -> None:
            await asyncio.sleep(number * 0.01)
            client = await ask(server, script(10_000, 0.05, 0, 1_000 + number), f"u{number}")
            await client.first
            client.transport.abort()
            left[1_000 + number] = loop.time()

        await asyncio.gather(*(leave(number) for number in range(count)))
        await asyncio.sleep(GRACE_SECONDS + 1.5)
        closed = order(model, do="closed")["closed"]
    spent = [closed[str(number)] - at - GRACE_SECONDS for number, at in left.items()]
    figures["cancel_to_upstream_close_p99_ms"] = percentile(spent, 99) * 1000


async def table(quick: bool, upstream: str, figures: Figures) -> None:
    """Failover on and off side by side: nothing here is short of processor time."""
    text = script(9, TURN_SECONDS / 9, TURN_SECONDS / 9)
    with (
        node(upstream) as on,
        node(upstream, queue_failover__enabled=False) as off,
    ):
        both = {"on": on, "off": off}
        seconds = 4 if quick else 20
        bursts = await asyncio.gather(*(burst(s, text) for s in both.values()))
        usuals = await asyncio.gather(*(usual(s, text, seconds, n) for n, s in both.items()))
    loads = {"burst": bursts, "usual": usuals}
    say("\n  load    failover     429   P50 s   P99 s  success  timeouts")
    for load, results in loads.items():
        for name, r in zip(both, results, strict=True):
            say(
                f"  {load:<8}{name:<10}{f'{r.refused}/{r.requests}':>6}{r.p50:>8.2f}{r.p99:>8.2f}"
                f"{r.success_rate:>9.1%}{r.timeout_rate:>10.1%}"
            )
    with_failover: list[LoadResult] = [results[0] for results in loads.values()]
    figures["success_rate"] = min(result.success_rate for result in with_failover)
    figures["queue_timeout_rate"] = max(result.timeout_rate for result in with_failover)
    figures["refusals"] = sum(result.refused for result in with_failover)
    figures["usual_p50_vs_off"] = usuals[0].p50 / usuals[1].p50
    for load, result in zip(loads, with_failover, strict=True):
        figures[f"{load}_p99_beyond_t_s"] = result.p99 - TURN_SECONDS


async def with_model(only: set[str], quick: bool, figures: Figures, ratios: Figures) -> None:
    with process(UPSTREAM) as (model, ready):
        upstream = ready["url"]
        if "litellm" in only:
            await beside_litellm(quick, upstream, figures, ratios)
        if only & {"lateness", "throughput"}:
            with node(upstream) as server:
                await every(server, 20, script(20, 0.01))
                if "lateness" in only:
                    await lateness(quick, server, figures)
                if "throughput" in only:
                    await throughput(quick, server, figures)
        if "waiting" in only:
            await waiting(quick, upstream, figures)
        if "grant" in only:
            await grants(quick, upstream, figures)
        if "cancel" in only:
            await cancels(quick, upstream, model, figures)
        if "table" in only:
            await table(quick, upstream, figures)


async def with_redis(only: set[str], quick: bool, figures: Figures) -> None:
    try:
        server = redis.start()
    except Missing as error:
        say(f"pool and log are left out: {error}")
        return
    try:
        if "pool" in only:
            await streaming_redis.measure_pool(server, quick, figures)
        if "log" in only:
            await streaming_redis.measure_log(server, quick, figures)
    finally:
        server.stop()


async def run(only: set[str], quick: bool) -> tuple[Figures, Figures]:
    figures: Figures = {}
    ratios: Figures = {}
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if only - {"pool", "log"}:
        await with_model(only, quick, figures, ratios)
    if only & {"pool", "log"}:
        await with_redis(only, quick, figures)
    return figures, ratios


def main() -> None:
    options = arguments(__doc__ or "", PARTS)
    figures, ratios = uvloop.run(run(set(options.only.split(",")), options.quick))
    finish("streaming", figures, ratios, as_json=options.json)


if __name__ == "__main__":
    main()
