"""What a token costs in the log of replies: CPU and bytes on a real Redis.

1,000 replies grow by one token with each call, as in a node that serves many slow
streams: one entry for each reply is the worst case, because where a log ends is looked
up once for each reply and call. The CPU is that of the codec, measured alone, and
Redis's own, all of it; what a node spends to send and to read answers is reported
beside it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import redis.asyncio  # noqa: E402

import engines.redis  # noqa: E402
from harness import arguments, finish  # noqa: E402
from holdfast.streaming.reply import EntryId, ReplyBegin, ReplyDelta, ReplyDone  # noqa: E402
from holdfast.streaming.reply_log.contract import LogAppend  # noqa: E402
from holdfast.streaming.reply_log.open_logs import OpenLogs  # noqa: E402
from holdfast.streaming.reply_log.redis import RedisReplyLog  # noqa: E402

BEGIN = ReplyBegin("acme", "user", "ann", "native", "native", "gpt", "node-1", 1.0)


def chunk(reply_id: str, token: str) -> bytes:
    """As api.openai.com sends it."""
    return (
        f'{{"id":"chatcmpl-{reply_id}","object":"chat.completion.chunk","created":1700000000,'
        '"model":"gpt-4o-2024-08-06","service_tier":"default","system_fingerprint":"fp_50cad350e4",'
        f'"choices":[{{"index":0,"delta":{{"content":"{token}"}},"logprobs":null,'
        '"finish_reason":null}]}'
    ).encode()


async def log_cost(url: str, replies: int = 1000, tokens: int = 300) -> dict[str, float]:
    """``log_us_per_token``, ``log_bytes_per_token`` and what a node adds, of an empty
    Redis.
    """
    log, client = RedisReplyLog(url), redis.asyncio.Redis.from_url(url)
    await client.flushall()
    names = [f"reply-{n:020}" for n in range(replies)]
    before_bytes = (await client.info("memory"))["used_memory_dataset"]
    epochs = [await log.begin(name, BEGIN) for name in names]
    batches = [
        [
            LogAppend(name, EntryId(epoch, n), [ReplyDelta(chunk(name, f" word{n}"))])
            for name, epoch in zip(names, epochs, strict=True)
        ]
        for n in range(1, tokens + 1)
    ]
    codec_seconds = _codec_seconds(batches)
    redis_before, node_before = await _redis_seconds(client), time.process_time()
    for batch in batches:
        await log.append(batch)
    node_seconds = time.process_time() - node_before
    redis_seconds = await _redis_seconds(client) - redis_before
    await log.append(
        [
            LogAppend(name, EntryId(epoch, tokens + 1), [ReplyDone()])
            for name, epoch in zip(names, epochs, strict=True)
        ]
    )
    stored = (await client.info("memory"))["used_memory_dataset"] - before_bytes
    await log.close()
    await client.flushall()
    await client.aclose()
    count = replies * tokens
    return {
        "log_us_per_token": (codec_seconds + redis_seconds) / count * 1e6,
        "log_bytes_per_token": stored / count,
        "log_node_us_per_token": node_seconds / count * 1e6,
    }


def _codec_seconds(batches: Sequence[Sequence[LogAppend]]) -> float:
    open_logs = OpenLogs()
    began_at = time.process_time()
    for batch in batches:
        for append in batch:
            open_logs.on_taken(open_logs.encode(append))
    return time.process_time() - began_at


async def _redis_seconds(client: redis.asyncio.Redis) -> float:
    used = await client.info("cpu")
    return float(used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"])


def main() -> None:
    options = arguments(__doc__ or "", ["log"])
    server = engines.redis.start()
    try:
        figures = asyncio.run(log_cost(server.url, replies=300 if options.quick else 1000))
    finally:
        server.stop()
    finish("streaming_log", figures, {}, as_json=options.json)


if __name__ == "__main__":
    main()
