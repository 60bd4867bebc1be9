"""Real nodes that die, stand still or stop while they make replies: what their clients
see, what becomes of their leases, and that nobody else is held up.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
from long_tier import IS_LONG, repeat, side_by_side, times
from reply_reader import ReplyClient, SeenReply, numbered_words, tokens_of
from reply_rig import chunk
from result_counts import tally
from streaming_rig import RigNode, streaming_rig
from upstream import After, Received, Upstream, completion
from work_rigs import until

from holdfast.streaming.reply import EntryId, ReplyBegin, ReplyDelta, ReplyDone
from holdfast.streaming.reply_log.contract import LogAppend
from holdfast.streaming.reply_log.redis import RedisReplyLog
from proof.results import Row

pytestmark = [pytest.mark.torture, pytest.mark.long]
END_SECONDS_MAX = 15.0
LEASES_SECONDS_MAX = 12.0
PAUSE_SECONDS_MAX = 3.0
PAUSED_SECONDS = 15.0 if IS_LONG else 12.5
"""Beyond the time after which a node is dead."""
STOP_SECONDS_MAX = 25.0
LONG = numbered_words(400)
"""About as much as the scripted model repeats."""
SHORT = numbered_words(5)


def is_prefix(reply: SeenReply, words: str) -> bool:
    return reply.tokens == list(tokens_of(words))[: len(reply.tokens)]


@asynccontextmanager
async def steady_load(node: RigNode) -> AsyncIterator[list[float]]:
    """Short replies one after the other; when each of them got its first token."""
    granted = list[float]()

    async def ask() -> None:
        while True:
            reply = await node.client.chat(SHORT, user=f"steady{len(granted)}")
            assert reply.succeeded, reply
            granted.append(reply.times[0])

    asking = asyncio.create_task(ask())
    try:
        yield granted
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


async def read_until_it_ends(node: RigNode, reply: SeenReply) -> SeenReply:
    with suppress(aiohttp.ClientError):
        await node.client.read(reply)
    reply.ended = time.monotonic()
    return reply


async def test_node_that_dies_or_stands_still_is_found_and_holds_nobody_up(tmp_path: Path) -> None:
    """Each waits for the ten seconds after which a node is dead."""
    await side_by_side(
        lambda: killed_node_ends_its_replies_and_frees_its_leases(tmp_path / "killed"),
        lambda: killed_node_with_queued_clients_holds_nobody_else_up(tmp_path / "queued"),
        lambda: paused_node_goes_on_with_its_own_replies(tmp_path / "paused"),
    )


async def killed_node_ends_its_replies_and_frees_its_leases(tmp_path: Path) -> None:
    """Its clients see a broken connection, readers elsewhere ``worker_lost``; its place
    in the pool is free soon; its Idempotency-Key runs again; others go on."""
    runs, began = times(30), time.perf_counter()

    async def kill(run: int) -> tuple[float, float, float]:
        settings = {"streaming.pool.total": 10}
        # without proxies in this loop: while it rests, nobody would call the pool, and
        # then nobody is dead for the next 10 s
        async with streaming_rig(tmp_path / str(run), with_links=False, settings=settings) as rig:
            return await _kill(*rig.nodes)

    took = await repeat(runs, kill, seconds_max=60)
    names = ("ends after s", "leases free after s", "grants paused s")
    slowest = dict(zip(names, map(max, zip(*took, strict=True)), strict=True))
    tally(
        Row(
            "kill -9 of a generating node",
            "three nodes; the victim streams to its own clients and to readers elsewhere",
            runs,
            0,
            "truthful ends within 15 s, leases free within 12 s, others' grants pause at most"
            " 3 s, the same key runs again",
            seconds=time.perf_counter() - began,
            figures={name: round(seconds, 1) for name, seconds in slowest.items()},
        )
    )
    assert slowest["ends after s"] <= END_SECONDS_MAX
    assert slowest["leases free after s"] <= LEASES_SECONDS_MAX
    assert slowest["grants paused s"] <= PAUSE_SECONDS_MAX


async def _kill(victim: RigNode, other: RigNode, third: RigNode) -> tuple[float, float, float]:
    """Seconds until its replies ended and its leases were free; the longest pause of
    another node's grants meanwhile.
    """
    direct = [asyncio.create_task(victim.client.chat(LONG, "slow", f"d{n}")) for n in range(4)]
    native = [await victim.client.start(LONG, "slow", f"n{n}") for n in range(3)]
    keyed = {"Idempotency-Key": "again"}
    native.append(await victim.client.start(LONG, "slow", "keyed", **keyed))
    readers = [asyncio.create_task(read_until_it_ends(other, reply)) for reply in native]
    await until(lambda: all(len(reply.tokens) > 3 for reply in native))
    async with steady_load(third) as granted:
        await until(lambda: len(granted) > 2)
        await victim.process.kill()
        killed = time.monotonic()
        freeing = asyncio.create_task(_time_of_at_most(third, 3))
        repeated = await _until_it_runs(other, "keyed", keyed, native[-1])
        seen_here, seen_there = await asyncio.gather(*direct), await asyncio.gather(*readers)
        free = await freeing
    seen = [*seen_here, *seen_there]
    assert all(is_prefix(reply, LONG) for reply in seen)
    assert [reply.ends for reply in seen] == [["aborted"]] * 4 + [["worker_lost"]] * 4
    assert repeated.reply_id != native[-1].reply_id
    moments = [killed, *(at for at in granted if at > killed)]
    pause = max(after - before for before, after in pairwise(moments))
    return max(reply.ended for reply in seen) - killed, free - killed, pause


async def killed_node_with_queued_clients_holds_nobody_else_up(tmp_path: Path) -> None:
    """The pool is full; its next grants go to a node that died a moment before."""
    settings = {"streaming.pool.total": 5}
    async with (
        asyncio.timeout(60),
        streaming_rig(tmp_path, nodes=2, with_links=False, settings=settings) as rig,
    ):
        victim, other = rig.nodes

        def ask(node: RigNode, words: str, model: str, user: str) -> asyncio.Task[SeenReply]:
            return asyncio.create_task(node.client.chat(words, model, user))

        lost = [ask(victim, LONG, "slow", f"running{n}") for n in range(4)]
        last = await other.client.start(numbered_words(80), "slow", "last")
        reading = asyncio.create_task(read_until_it_ends(other, last))
        await _until_queue(other, active=5, waiting=0)
        lost += [ask(victim, SHORT, "words", f"queued{n}") for n in range(8)]
        others = [ask(other, SHORT, "words", f"other{n}") for n in range(8)]
        await _until_queue(other, active=5, waiting=16)
        await until(lambda: len(last.tokens) > 70)  # its end is the first place that is free
        await victim.process.kill()
        killed = time.monotonic()
        seen = await asyncio.gather(*lost)
        assert {reply.end for reply in seen} == {"aborted"}
        assert max(reply.ended for reply in seen) - killed <= END_SECONDS_MAX
        went_on = await asyncio.gather(reading, *others)
        assert all(reply.end == "done" for reply in went_on)
        moments = sorted([last.times[-1], *(reply.times[0] for reply in went_on[1:])])
        assert max(after - before for before, after in pairwise(moments)) <= PAUSE_SECONDS_MAX
        assert await _time_of_at_most(other, 0) - killed <= LEASES_SECONDS_MAX


async def _until_queue(node: RigNode, active: int, waiting: int) -> None:
    while True:
        pool = (await node.status())["pools"]["default"]
        if (pool["active"], pool["waiting"]) == (active, waiting):
            return
        await asyncio.sleep(0.1)


async def _time_of_at_most(node: RigNode, count: int) -> float:
    """When so few were active: the load, and the key that runs again, not the dead."""
    while True:
        if int((await node.status())["pools"]["default"]["active"]) <= count:
            return time.monotonic()
        await asyncio.sleep(0.1)


async def _until_it_runs(
    node: RigNode, user: str, keyed: dict[str, str], lost: SeenReply
) -> SeenReply:
    """Repeat a POST until it begins a new reply, then cancel that."""
    async with asyncio.timeout(END_SECONDS_MAX):
        while True:
            reply = await node.client.start(LONG, "slow", user, **keyed)
            if reply.status < 300 and reply.reply_id != lost.reply_id:
                await node.client.cancel(reply.reply_id)
                return reply
            await asyncio.sleep(0.2)


async def test_request_that_kills_its_node_kills_one_and_is_502_once(tmp_path: Path) -> None:
    """It dies when the provider has its request: nobody sends that again."""
    nodes = list[RigNode]()

    async def kill_who_asks(request: Received, writer: asyncio.StreamWriter) -> After:
        if b"deadly" not in request.body:
            return await completion("fine")(request, writer)
        for node in nodes:
            if await node.running_replies():
                await node.process.kill()
        return "hang"

    async with asyncio.timeout(60), Upstream(kill_who_asks) as upstream:
        settings = {
            "streaming.providers": [{"name": "real", "base_url": upstream.base_url}],
            "streaming.models": [{"name": "real", "providers": ["real:m"]}],
        }
        async with streaming_rig(tmp_path, with_nginx=True, settings=settings) as rig:
            nodes += rig.nodes
            assert (await rig.client.chat("harmless", "real")).succeeded  # the pool has begun
            seen = await rig.client.chat("deadly", "real")
            assert (seen.status, seen.ends) == (502, ["502"])
            assert [await node.is_ready() for node in nodes].count(False) == 1
            for _ in nodes:  # the dead one's turn, too
                assert (await rig.client.chat("harmless", "real")).succeeded
            assert [b"deadly" in request.body for request in upstream.requests].count(True) == 1


async def test_paused_node_writes_nothing_of_an_epoch_that_was_made_elsewhere(
    tmp_path: Path,
) -> None:
    """An assistant's node stands still; its job runs again, as at another node, and
    writes the whole reply. What the first node goes on to say is refused, and the chat
    gets the reply that the log has."""
    assistant = {"tenant": "acme", "user": "bot", "model": "slow"}
    async with (
        asyncio.timeout(60),
        streaming_rig(
            tmp_path, nodes=1, with_links=False, settings={"streaming.assistants": [assistant]}
        ) as rig,
    ):
        node = rig.nodes[0]
        texts = await _ask_assistant(node, rig.key, LONG)

        async def has_grown() -> bool:
            return any(reply["entries"] > 5 for reply in await node.running_replies())

        await until(has_grown)
        [found] = await node.running_replies()
        node.process.send(signal.SIGSTOP)
        assert rig.redis is not None
        log = await RedisReplyLog.open(rig.redis.url)
        reply_id = str(found["reply_id"])
        page = await log.read(reply_id, None, 1)
        assert page is not None
        begin = page.entries[0][1]
        assert isinstance(begin, ReplyBegin)
        epoch = await log.begin(reply_id, begin)
        made = [ReplyDelta(chunk("made elsewhere")), ReplyDelta(chunk("", "stop")), ReplyDone()]
        await log.append([LogAppend(reply_id, EntryId(epoch, 1), made)])
        before = await log.read(reply_id, EntryId(page.last.epoch, 0), 10_000)
        node.process.send(signal.SIGCONT)
        await until(texts)
        assert await texts() == ["made elsewhere"]
        assert await log.read(reply_id, EntryId(page.last.epoch, 0), 10_000) == before
        await log.close()


async def _ask_assistant(
    node: RigNode, key: str, words: str
) -> Callable[[], Awaitable[Sequence[str]]]:
    """Write to an assistant in a direct chat; returns how to read what it answered."""
    headers = {"Authorization": f"Bearer {key}", "X-Act-As": "ann"}
    made = await node.session.post(
        "/v1/chats", json={"kind": "direct", "members": ["bot"]}, headers=headers
    )
    path = f"/v1/chats/{(await made.json())['chat']['chat_id']}/messages"
    sent = await node.session.post(
        path, json={"content": words}, headers={**headers, "Idempotency-Key": "question"}
    )
    assert sent.status == 201, await sent.text()

    async def texts() -> Sequence[str]:
        page = await (await node.session.get(path, headers=headers)).json()
        by_bot = [m for m in page["messages"] if m["sender_id"] == "bot" and m["kind"] == "text"]
        return [message["content"] for message in by_bot]

    return texts


async def paused_node_goes_on_with_its_own_replies(tmp_path: Path) -> None:
    """It stands still beyond the time after which it is dead: its clients get the rest,
    its log has one epoch without a hole, and it makes new replies."""
    runs, began = times(20), time.perf_counter()

    async def pause(run: int) -> None:
        async with streaming_rig(tmp_path / str(run), nodes=2) as rig:
            await _pause(*rig.nodes)

    await repeat(runs, pause, seconds_max=60)
    tally(
        Row(
            "node paused beyond its lease",
            f"SIGSTOP for {PAUSED_SECONDS:g} s while it streams",
            runs,
            0,
            "its own replies go on to their end; no entry of an old epoch, none twice",
            seconds=time.perf_counter() - began,
        )
    )


async def _pause(victim: RigNode, other: RigNode) -> None:
    words = numbered_words(100)
    direct = [asyncio.create_task(victim.client.chat(words, "slow", f"d{n}")) for n in range(3)]
    native = await victim.client.start(words, "slow", "native")
    reading = asyncio.create_task(read_until_it_ends(victim, native))
    elsewhere = SeenReply(reply_id=native.reply_id)
    watching = asyncio.create_task(read_until_it_ends(other, elsewhere))
    await until(lambda: native.tokens and elsewhere.tokens)
    victim.process.send(signal.SIGSTOP)
    await asyncio.sleep(PAUSED_SECONDS)
    assert (await other.client.chat(SHORT)).succeeded
    victim.process.send(signal.SIGCONT)
    seen = [*await asyncio.gather(*direct), await reading]
    assert [(reply.text, reply.ends) for reply in seen] == [(words, ["done"])] * 4
    assert (await watching).end == "worker_lost", "for a reader it was dead"
    late = await other.client.read_through(SeenReply(reply_id=native.reply_id))
    assert late.ids == native.ids and late.text == words, "one epoch, every entry once"
    assert (await victim.client.chat(SHORT)).succeeded


async def test_planned_stop_ends_each_reply_truthfully(tmp_path: Path) -> None:
    """50 running, 50 waiting: done or an explicit error for each, within 25 s; who posts
    meanwhile through NGINX succeeds, as an SDK does, with two more tries."""
    drain, many = (20, 50) if IS_LONG else (5, 15)  # a reply of 3 s ends in time
    settings = {"streaming.pool.per_user": 1, "streaming.times.drain_seconds": drain}
    words = numbered_words(60)
    async with (
        asyncio.timeout(180),
        streaming_rig(tmp_path, with_nginx=True, settings=settings) as rig,
    ):
        victim, posting, answered = rig.nodes[0], True, list[SeenReply]()

        async def keep_posting(number: int) -> None:
            while posting:
                answered.append(await _as_an_sdk(rig.client, f"p{number}"))

        asked = [("slow" if n % 2 else "crawl", f"u{n}") for n in range(many)]
        running = [asyncio.create_task(victim.client.chat(words, m, u)) for m, u in asked]
        await asyncio.sleep(1)
        waiting = [asyncio.create_task(victim.client.chat(words, m, u)) for m, u in asked]
        await asyncio.sleep(2.5)  # these have their headers, and wait inside the stream
        posters = [asyncio.create_task(keep_posting(number)) for number in range(4)]
        await until(lambda: len(answered) > 4)
        victim.process.send(signal.SIGTERM)
        stopped = time.monotonic()
        async with asyncio.timeout(STOP_SECONDS_MAX + 5):
            seen = await asyncio.gather(*running, *waiting)
            await victim.process.ended()
        took = time.monotonic() - stopped
        posting = False
        await asyncio.gather(*posters)
    assert took <= STOP_SECONDS_MAX
    assert {reply.end for reply in seen} <= {"done", "server_shutdown"}
    assert all(len(reply.ends) == 1 for reply in seen)
    assert all(reply.text == words for reply in seen if reply.end == "done")
    assert {reply.end for reply in seen[:many]} == {"done", "server_shutdown"}, "both happened"
    assert all(reply.succeeded for reply in answered), [r for r in answered if not r.succeeded]


async def _as_an_sdk(client: ReplyClient, user: str) -> SeenReply:
    """openai-python repeats 5xx and refused connections twice, after 0.5 and 1 s."""
    for pause in (0.5, 1.0, 0.0):
        reply = await client.chat(SHORT, user=user)
        if reply.succeeded or (200 <= reply.status < 500):
            break
        await asyncio.sleep(pause)
    return reply


async def test_killed_embedded_node_resumes_finished_replies_whole(tmp_path: Path) -> None:
    """kill -9 and a new start: finished replies are whole and their usage is exact,
    unfinished ones are a prefix and ``server_restarted``."""
    runs, began = times(30), time.perf_counter()

    async def kill(run: int) -> int:
        async with streaming_rig(tmp_path / str(run), nodes=1, with_redis=False) as rig:
            return await _kill_embedded(rig.nodes[0], random.Random(run))

    finished = sum(await repeat(runs, kill, seconds_max=60))
    tally(
        Row(
            "kill -9 of the embedded node",
            "one node on SQLite; ten replies of different lengths; started again",
            runs,
            0,
            "finished replies whole, unfinished a prefix and server_restarted, usage of the"
            " finished exact",
            f"0..{runs - 1}",
            seconds=time.perf_counter() - began,
            figures={"finished": finished, "unfinished": 10 * runs - finished},
        )
    )
    assert 0 < finished < 10 * runs


async def _kill_embedded(node: RigNode, rng: random.Random) -> int:
    """How many of ten replies had finished."""
    asked = {f"user{n}": numbered_words(rng.randrange(2, 120)) for n in range(10)}
    started = {user: await node.client.start(text, user=user) for user, text in asked.items()}
    reading = [asyncio.create_task(read_until_it_ends(node, reply)) for reply in started.values()]
    await asyncio.sleep(rng.uniform(0.3, 1.0))
    await node.process.kill()
    await asyncio.gather(*reading)
    await node.start()
    finished = 0
    tokens = await node.completion_tokens()
    for user, reply in started.items():
        again = await node.client.read_through(SeenReply(reply_id=reply.reply_id))
        whole = asked[user]
        if again.ends == ["done"]:
            assert again.text == whole
            assert tokens[user] == len(tokens_of(whole))
        else:
            assert reply.ends == [], "what a client saw end is finished"
            assert again.ends == ["server_restarted"] and is_prefix(again, whole)
            # its client may have read more than was on the disk
            assert (await node.client.read_through(reply)).ends == ["server_restarted"]
        finished += again.ends == ["done"]
    return finished
