"""Real nodes whose Redis is flushed, stopped, killed or paused, or that are cut off from
it, under steady load: running replies go on, waiting clients keep waiting, and soon all
is as before.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from long_tier import repeat, times
from reply_reader import SeenReply, most_at_once, numbered_words
from result_counts import tally
from streaming_rig import StreamingRig, streaming_rig
from work_rigs import until

from engines import redis
from proof.results import Row

pytestmark = [pytest.mark.torture, pytest.mark.long]
TOTAL = 6
CLIENTS = 3 * TOTAL
"""Each of another user: more than may run even if every bound is reached."""
WORDS = numbered_words(20)
NORMAL_SECONDS_MAX = 5.0
ALONE_SECONDS = 3.5
"""After this time without Redis every node goes on with a pool of its own."""
FAULTS = ("flush", "stop", "kill", "pause", "cut off")
SETTINGS = {"streaming.pool.total": TOTAL, "streaming.queue_failover.timeout_seconds": 60}


@asynccontextmanager
async def full_load(rig: StreamingRig) -> AsyncIterator[list[SeenReply]]:
    """Three times as many clients as may run, each asking its node again and again;
    what became of their replies. Leaving the block waits for the last of them.
    """
    seen, is_over = list[SeenReply](), False

    async def ask(number: int) -> None:
        while not is_over:
            node = rig.nodes[number % len(rig.nodes)]
            seen.append(await node.client.chat(WORDS, "slow", f"u{number}"))

    asking = [asyncio.create_task(ask(number)) for number in range(CLIENTS)]
    try:
        yield seen
    finally:
        is_over = True
        await asyncio.gather(*asking)


async def break_redis(rig: StreamingRig, fault: str, seconds: float) -> None:
    """Until it is healed."""
    server, link = rig.redis, rig.nodes[0].link
    assert server is not None and link is not None
    match fault:
        case "flush":
            redis.say(server, "FLUSHALL")
        case "stop" | "kill":
            process = server.process
            process.send_signal(signal.SIGTERM if fault == "stop" else signal.SIGKILL)
            await asyncio.to_thread(process.wait)
            await asyncio.sleep(seconds)
            rig.redis = redis.start(server.port)
            rig.stack.callback(rig.redis.stop)
        case "pause":
            server.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            server.process.send_signal(signal.SIGCONT)
        case "cut off":
            link.set(down=True)
            await asyncio.sleep(seconds)
            link.set(down=False)


async def is_shared(rig: StreamingRig) -> bool:
    """Whether every node uses the shared pool and sees all others."""
    for node in rig.nodes:
        status = await node.status()
        if status["shared_pool"] != "up" or len(status["nodes"]) != len(rig.nodes):
            return False
    return True


async def test_redis_that_fails_ends_no_reply_and_all_is_normal_soon(tmp_path: Path) -> None:
    """Flushed, stopped, killed, paused; or one node is cut off from it."""
    runs, began = times(50), time.perf_counter()

    async def fail(run: int) -> tuple[list[SeenReply], float]:
        async with streaming_rig(tmp_path / str(run), settings=SETTINGS) as rig:
            async with full_load(rig) as seen:
                await until(lambda: len(seen) > CLIENTS)
                fault, broken = FAULTS[run % len(FAULTS)], time.monotonic()
                await break_redis(rig, fault, 12 if run >= 25 else 5)
                healed = time.monotonic()
                await until(lambda: is_shared(rig))
                took = time.monotonic() - healed
            if fault != "flush":
                alone = broken + ALONE_SECONDS
                assert any(alone < reply.times[0] < healed for reply in seen), "grants go on"
            producer, reader, *_ = rig.nodes
            resumed = await reader.client.read_through(await producer.client.start(WORDS))
            assert resumed.text == WORDS, "replicated as before"
            return seen, took

    results = await repeat(runs, fail, seconds_max=120)
    replies = [reply for seen, _ in results for reply in seen]
    failed = [reply for reply in replies if not reply.succeeded or reply.text != WORDS]
    most, slowest = max(most_at_once(seen) for seen, _ in results), max(t for _, t in results)
    tally(
        Row(
            "Redis of replies fails",
            "three nodes under three times the load they may run; Redis flushed, stopped,"
            " killed, paused, or one node cut off from it",
            runs,
            len(failed),
            "every reply whole with its end, waiting clients keep waiting, active at most twice"
            " the total, normal again within 5 s",
            seconds=time.perf_counter() - began,
            figures={
                "replies": len(replies),
                f"most active of {TOTAL}": most,
                "normal again after s": round(slowest, 1),
            },
        )
    )
    assert most <= 2 * TOTAL
    assert slowest <= NORMAL_SECONDS_MAX
