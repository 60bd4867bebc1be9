"""How many tokens a node can take from providers: parser, HTTP and routing together,
from a model server on loopback (``tests/support/upstream.py``, its own process).

Every token comes in a write of its own, as from real providers, over many streams at
once. The capacity is what one core could do: tokens divided by the CPU time of this
process. ``bench/streaming.py`` measures the same through a whole node.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import uvloop

from holdfast.clock import SystemClock
from holdfast.streaming.pool.contract import DEFAULT_POOL
from holdfast.streaming.providers.contract import ProviderRequest
from holdfast.streaming.providers.routing import Routing, open_routing
from holdfast.streaming.settings import ModelSettings, ProviderSettings, StreamingSettings

UPSTREAM = Path(__file__).resolve().parent.parent / "tests" / "support" / "upstream.py"


class SharedLease:
    """All streams here need the same lease."""

    pool = DEFAULT_POOL

    async def move(self, pool: str) -> None:
        raise AssertionError(f"there is no pool {pool} here")


@contextmanager
def upstream(*options: str) -> Iterator[str]:
    """The address of a model server that sends tokens as ``options`` say."""
    command = [sys.executable, str(UPSTREAM), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.communicate()


async def _read(route: Routing) -> int:
    request = ProviderRequest("m", {"messages": b'[{"role":"user","content":"hi"}]'}, "r1")
    async with aclosing(route.stream(request, SharedLease())) as stream:
        return sum(chunk.content for batch in [b async for b in stream] for chunk in batch)


async def _measure(base_url: str, streams: int) -> tuple[float, float]:
    settings = StreamingSettings(
        providers=(ProviderSettings("up", base_url=base_url),),
        models=(ModelSettings("m", ("up:m",)),),
    )
    route = open_routing(settings, {}, SystemClock(), random.Random(1))
    await _read(route)
    began, began_cpu = time.perf_counter(), time.process_time()
    tokens = sum(await asyncio.gather(*(_read(route) for _ in range(streams))))
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    await route.close()
    return tokens / seconds, cpu / tokens * 1e6


def provider_tokens(streams: int, rate: float, seconds: float) -> tuple[float, float]:
    """(tokens per second that came, microseconds of CPU for each)."""
    with upstream("--rate", str(rate), "--tokens", str(int((rate or 20_000) * seconds))) as url:
        return uvloop.run(_measure(url, streams))


if __name__ == "__main__":
    for streams, rate in ((50, 20.0), (500, 20.0), (100, 100.0), (4, 0.0)):
        per_second, micros = provider_tokens(streams, rate, 3)
        print(
            f"{streams} streams at {rate:g} tokens/s: {per_second:,.0f} tokens/s came,"
            f" {micros:.1f} µs CPU each, so one core takes {1e6 / micros:,.0f} tokens/s"
        )
