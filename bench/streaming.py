"""Streaming AI replies: what Holdfast adds between a model and its client, beside
LiteLLM's proxy before the same model.

- litellm: time to the first token at 1 and 10 replies at once, beyond what the model
  itself takes, and processor time per token with 50 replies of 20 tokens a second; in
  turn with LiteLLM, and without --quick with vLLM's router if it is installed
- lateness: 500 replies of 20 tokens a second: how long a token is under way while all
  of them run, p99; also 1,000
- throughput: tokens a second from a model that does not pause
- waiting: memory of a client that waits, of 5,000
- grant: from the only token of a reply to that of the next in the queue, p99
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
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
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

import streaming_log  # noqa: E402
import streaming_peers  # noqa: E402
import streaming_pool  # noqa: E402
from engines import Missing, redis  # noqa: E402
from harness import (  # noqa: E402
    Child,
    arguments,
    cpu_seconds,
    finish,
    median,
    percentile,
    process,
    processes,
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
WAITING = 5_000
WAIT_SECONDS_MAX = 20.0
TURN_SECONDS = 0.9
"""T of the table: how long a reply takes."""
KINDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "single": {
        "streaming.pool.total": 1,
        "streaming.queue_failover.waiting_per_tenant": 5_000,
        "streaming.queue_failover.timeout_seconds": 120,
    },
    "short grace": {"streaming.times.cancel_seconds": GRACE_SECONDS},
    "no failover": {"streaming.queue_failover.enabled": False},
}
"""Settings of the nodes."""
NEEDS = {
    "litellm": ["usual"],
    "lateness": ["usual"],
    "throughput": ["usual"],
    "waiting": ["single"],
    "grant": ["single"],
    "cancel": ["short grace"],
    "table": ["usual", "no failover"],
}
"""The nodes of each part."""
Figures = dict[str, float]
Servers = dict[str, ReplyServer]


def script(tokens: int, gap: float, first: float = 0.02, number: int = 0) -> str:
    return f"tokens={tokens} gap={gap} first={first} id={number}"


@contextmanager
def nodes(upstream: str, kinds: Iterable[str]) -> Iterator[dict[str, ReplyServer]]:
    """Nodes of these kinds, started side by side; one that has nothing to do takes no
    time.
    """
    chosen = sorted(kinds)
    commands = [(NODE, upstream, json.dumps(KINDS[kind])) for kind in chosen]
    with processes(*commands) as children:
        yield {
            kind: ReplyServer(ready["url"], ready["key"], child.pid)
            for kind, (child, ready) in zip(chosen, children, strict=True)
        }


async def first_token_ms(server: ReplyServer, at_once: int, rounds: int) -> float:
    """The median from a request to its first token, which the model has after 20 ms."""
    spent = list[float]()
    for _ in range(rounds):
        replies = await every(server, at_once, script(3, 0.005))
        spent += [(reply.first - reply.asked) * 1000 for reply in replies]
    return median(spent)


async def cpu_us_per_token(server: ReplyServer, seconds: float) -> float:
    """Of 50 replies of 20 tokens a second, their beginning and end included."""
    before = cpu_seconds(server.pid)
    replies = await every(server, 50, script(int(seconds * 20), 0.05), spread_seconds=0.5)
    return (cpu_seconds(server.pid) - before) / sum(reply.tokens for reply in replies) * 1e6


async def beside_litellm(
    quick: bool,
    direct: ReplyServer,
    measured: Servers,
    figures: Figures,
    ratios: Figures,
) -> None:
    """``direct``: the model itself."""
    rounds, each, seconds = (2, 8, 1.5) if quick else (9, 40, 5.0)
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
    if "litellm" in measured:
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
    for streams, spread in ((500, 2.0),) if quick else ((500, 2.0), (1_000, 4.0)):
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


async def waiting(server: ReplyServer, figures: Figures) -> None:
    """One reply runs and lets nobody else; then everybody leaves."""
    memory = psutil.Process(server.pid).memory_info
    first = await ask(server, script(1_000, 1), "holder")
    await first.first
    before = memory().rss
    clients = [await ask(server, script(1, 0), f"u{number}") for number in range(WAITING)]
    asked = time.monotonic()
    while left := [c.reply for c in clients if c.reply.status != 200]:
        if left[0].status or time.monotonic() > asked + WAIT_SECONDS_MAX:
            raise RuntimeError(f"{len(left)} do not wait: {left[0].failure[-300:]!r}")
        await asyncio.sleep(0.1)  # headers come after 2 s, and the first comment
    figures["waiting_client_kb"] = (memory().rss - before) / WAITING / 1000
    for client in [*clients, first]:
        client.transport.abort()


async def grants(quick: bool, server: ReplyServer, figures: Figures) -> None:
    """Each reply is one token that the model has at once; one runs, the others wait. So
    from one token to the next is an end, a grant and a first token.
    """
    count = 200 if quick else 1_000
    replies = await asyncio.gather(
        *(whole(server, script(1, 0, 0), f"u{number}") for number in range(count))
    )
    replies.sort(key=lambda reply: reply.first)
    assert all(reply.succeeded for reply in replies), "a reply failed"
    gaps = [(after.first - before.first) * 1000 for before, after in pairwise(replies)]
    figures["grant_to_first_token_p99_ms"] = percentile(gaps, 99)


async def cancels(quick: bool, server: ReplyServer, model: Child, figures: Figures) -> None:
    count, left = 50 if quick else 500, dict[int, float]()

    async def leave(number: int) -> None:
        await asyncio.sleep(number * 0.01)
        client = await ask(server, script(10_000, 0.05, 0, number), f"u{number}")
        await client.first
        client.transport.abort()
        left[number] = time.monotonic()

    await asyncio.gather(*(leave(number) for number in range(1, count + 1)))
    await asyncio.sleep(GRACE_SECONDS + 1.5)
    closed = order(model, do="closed")["closed"]
    spent = [closed[str(number)] - at - GRACE_SECONDS for number, at in left.items()]
    figures["cancel_to_upstream_close_p99_ms"] = percentile(spent, 99) * 1000


async def table(quick: bool, servers: Servers, figures: Figures) -> None:
    """Both loads, with failover and without, at once: nothing is short of processor
    time, and no user is in two of them.
    """
    text, seconds = script(9, TURN_SECONDS / 9, TURN_SECONDS / 9), 3 if quick else 20
    both = {"on": servers["usual"], "off": servers["no failover"]}
    results: list[LoadResult] = await asyncio.gather(
        *(burst(server, text) for server in both.values()),
        *(usual(server, text, seconds, name) for name, server in both.items()),
    )
    names = [(load, failover) for load in ("burst", "usual") for failover in both]
    say("\n  load    failover     429   P50 s   P99 s  success  timeouts")
    for (load, failover), r in zip(names, results, strict=True):
        say(
            f"  {load:<8}{failover:<10}{f'{r.refused}/{r.requests}':>6}{r.p50:>8.2f}{r.p99:>8.2f}"
            f"{r.success_rate:>9.1%}{r.timeout_rate:>10.1%}"
        )
    burst_on, _, usual_on, usual_off = results
    figures["success_rate"] = min(burst_on.success_rate, usual_on.success_rate)
    figures["queue_timeout_rate"] = max(burst_on.timeout_rate, usual_on.timeout_rate)
    figures["refusals"] = burst_on.refused + usual_on.refused
    figures["usual_p50_vs_off"] = usual_on.p50 / usual_off.p50
    figures["burst_p99_beyond_t_s"] = burst_on.p99 - TURN_SECONDS
    figures["usual_p99_beyond_t_s"] = usual_on.p99 - TURN_SECONDS


async def with_model(only: set[str], quick: bool, figures: Figures, ratios: Figures) -> None:
    kinds = {kind for part in only for kind in NEEDS.get(part, ())}
    with (
        process(UPSTREAM) as (model, ready),
        nodes(ready["url"], kinds) as servers,
        ExitStack() as stack,
    ):
        if "litellm" in only:
            peers = {"litellm": stack.enter_context(streaming_peers.litellm(ready["url"]))}
            if not quick:
                router = streaming_peers.vllm_router(ready["url"])
                peers["vllm_router"] = stack.enter_context(router)
        # What is counted in seconds or in Redis's own time can run while it starts.
        if "cancel" in only:
            await cancels(quick, servers["short grace"], model, figures)
        if "table" in only:
            await table(quick, servers, figures)
        if only & {"pool", "log"}:
            await with_redis(only, quick, figures)
        if "litellm" in only:
            since = time.monotonic()
            measured = {"holdfast": servers["usual"]}
            measured |= {name: peer for name, is_ready in peers.items() if (peer := is_ready())}
            say(f"  waited {time.monotonic() - since:.0f} s for the peers to start")
            direct = ReplyServer(ready["url"], "none")
            await beside_litellm(quick, direct, measured, figures, ratios)
            stack.close()
        if "lateness" in only:
            await lateness(quick, servers["usual"], figures)
        if "throughput" in only:
            await throughput(quick, servers["usual"], figures)
        if "grant" in only:
            await grants(quick, servers["single"], figures)
        if "waiting" in only:
            await waiting(servers["single"], figures)


async def with_redis(only: set[str], quick: bool, figures: Figures) -> None:
    try:
        server = redis.start()
    except Missing as error:
        say(f"pool and log are left out: {error}")
        return
    try:
        if "log" in only:
            figures |= await streaming_log.log_cost(server.url, replies=300 if quick else 1_000)
        if "pool" in only:
            costs = await streaming_pool.measure(server.url, 960 if quick else 3_360)
            figures |= {f"pool_us_{name}": us for name, us in costs.items() if "pool" not in name}
            figures["pool_us_per_op"] = costs["pool_us_per_op"]
    finally:
        server.stop()


async def run(only: set[str], quick: bool) -> tuple[Figures, Figures]:
    figures: Figures = {}
    ratios: Figures = {}
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if only - {"pool", "log"}:
        await with_model(only, quick, figures, ratios)
    else:
        await with_redis(only, quick, figures)
    return figures, ratios


def main() -> None:
    options = arguments(__doc__ or "", PARTS)
    figures, ratios = uvloop.run(run(set(options.only.split(",")), options.quick))
    finish("streaming", figures, ratios, as_json=options.json)


if __name__ == "__main__":
    main()
