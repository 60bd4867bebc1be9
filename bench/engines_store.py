"""The PostgreSQL store alone beside the embedded one; parts of `engines.py`.

- groups: processor time per send of the node (this process) and of the server (all of
  its processes), and sends per second of eight lanes, by group size; the ratios are to
  the embedded store with groups of the same size, whose processor time is all of it;
- hot: sends per second into one chat from three nodes, each with groups of 16, against
  one node.

On a machine with few cores the node, the server and its disk share them: read the
processor times, not the rates.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from msgspec.structs import replace

import store as embedded
from engines import Server
from harness import median
from holdfast.message import Acked, Draft, User
from holdfast.store.commands import CommandContext, CreateChat
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings

GROUPS = (1, 16, 128)
LANES = 8
ROUNDS = 3


def _seconds(quick: bool) -> float:
    return 0.3 if quick else 2.0


async def create_chats(store: PostgresStore) -> None:
    for chat in range(embedded.CHATS):
        owner = User("default", f"user_{chat}_0")
        members = [f"user_{chat}_{n}" for n in range(1, embedded.MEMBERS)]
        act = CommandContext(owner, "", "")
        await store.change(CreateChat(act, f"chat_{chat}", "group", "bench", members))


async def send_all(store: PostgresStore, groups: Sequence[Sequence[Draft]], until: float) -> int:
    """One group after the other; how many sends were acknowledged in time."""
    done = 0
    for group in groups:
        outcomes = await store.append(group)
        assert all(isinstance(outcome, Acked) for outcome in outcomes)
        done += len(group)
        if time.perf_counter() > until:
            break
    return done


async def measure(
    server: Server, store: PostgresStore, group: int, seconds: float
) -> tuple[float, float, float]:
    """Sends per second, and microseconds of the node's and the server's processors."""
    rng = random.Random()
    count = max(20, int(seconds * 4_000 / group))
    chats = [
        [n for n in range(embedded.CHATS) if store.lane(f"chat_{n}") == lane]
        for lane in range(LANES)
    ]
    lanes = [[_of_lane(rng, each, group) for _ in range(count)] for each in chats]
    await asyncio.gather(*(send_all(store, [lane.pop()], 0) for lane in lanes))  # makes its plans
    began, node, used = time.perf_counter(), time.process_time(), server.cpu_seconds()
    done = sum(await asyncio.gather(*(send_all(store, lane, began + seconds) for lane in lanes)))
    took = time.perf_counter() - began
    node, used = time.process_time() - node, server.cpu_seconds() - used
    return done / took, node / done * 1e6, used / done * 1e6


def _of_lane(rng: random.Random, chats: Sequence[int], count: int) -> list[Draft]:
    """A group as a node makes it: of chats of one shard."""
    made = []
    for draft in embedded.drafts(rng, count):
        chat = rng.choice(chats)
        sender = User("default", f"user_{chat}_{rng.randrange(embedded.MEMBERS)}")
        made.append(_moved(draft, sender, f"chat_{chat}"))
    return made


def _moved(draft: Draft, sender: User, chat_id: str) -> Draft:
    return replace(draft, sender=sender, chat_id=chat_id)


async def by_group(
    server: Server, quick: bool, figures: dict[str, float], ratios: dict[str, float]
) -> None:
    seconds = _seconds(quick)
    async with PostgresStore(PostgresStoreSettings(server.url)) as store:
        await create_chats(store)
        for group in GROUPS:
            ours, theirs = [], []
            for _ in range(ROUNDS):
                ours.append(await measure(server, store, group, seconds))
                theirs.append(await asyncio.to_thread(embedded.measure, group, seconds))
            rate, node, used = (median(values) for values in zip(*ours, strict=True))
            other_rate, other_cpu = (median(values) for values in zip(*theirs, strict=True))
            figures[f"group_{group}_sends_per_second"] = round(rate)
            figures[f"group_{group}_node_cpu_us"] = round(node, 1)
            figures[f"group_{group}_server_cpu_us"] = round(used, 1)
            figures[f"group_{group}_embedded_cpu_us"] = round(other_cpu, 1)
            ratios[f"group_{group}_sends_vs_embedded"] = rate / other_rate
            ratios[f"group_{group}_node_cpu_vs_embedded"] = node / other_cpu


async def hot_chat(server: Server, quick: bool, ratios: dict[str, float]) -> None:
    seconds = _seconds(quick)
    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(PostgresStore(PostgresStoreSettings(server.url)))
            for _ in range(3)
        ]
        act = CommandContext(User("default", "ann"), "", "")
        await stores[0].change(CreateChat(act, "chat_hot", "group", "bench", []))
        rates: dict[int, list[float]] = {1: [], 3: []}
        for _ in range(ROUNDS):
            for nodes, measured in rates.items():
                began = time.perf_counter()
                groups = [_into_hot_chat(16, int(seconds * 500)) for _ in range(nodes)]
                writing = zip(stores[:nodes], groups, strict=True)
                done = await asyncio.gather(*(send_all(s, g, began + seconds) for s, g in writing))
                measured.append(sum(done) / (time.perf_counter() - began))
        ratios["pg_hot_chat_3_vs_1"] = median(rates[3]) / median(rates[1])


def _into_hot_chat(group: int, count: int) -> list[list[Draft]]:
    rng, ann = random.Random(), User("default", "ann")
    return [
        [_moved(draft, ann, "chat_hot") for draft in embedded.drafts(rng, group)]
        for _ in range(count)
    ]
