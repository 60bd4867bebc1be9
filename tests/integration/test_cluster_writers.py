"""A hundred people write in one chat, over three nodes, all at once."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from cluster_rig import ClusterPerson, ClusterRig, cluster_rig
from long_tier import IS_LONG
from result_counts import tally

from holdfast.verify.checkers import check, red
from proof.results import Row

NODES = 3
WRITERS = 100
SETTINGS = {"durability.chats.members_at_creation_max": WRITERS}
SENDS = 10 if IS_LONG else 1
"""Of each writer."""


async def write(person: ClusterPerson, chat_id: str) -> list[int]:
    return [await person.say(chat_id, f"{person.user.user_id} {n}") for n in range(SENDS)]


async def everybody_writes(rig: ClusterRig) -> None:
    """Judge what a hundred people have sent and received."""
    people = [rig.person(f"w{n}", n % NODES) for n in range(WRITERS)]
    users = [person.user.user_id for person in people]
    chat_id = await rig.chat(*users)
    async with AsyncExitStack() as stack:
        for person in people:
            await stack.enter_async_context(person.online())
        await people[0].say(chat_id, "everybody knows the chat now")
        await asyncio.gather(*(person.has(chat_id, 1) for person in people))
        began = time.monotonic()
        numbers = await asyncio.gather(*(write(person, chat_id) for person in people))
        total = 1 + WRITERS * SENDS
        assert sorted(number for each in numbers for number in each) == list(range(2, total + 1))
        await asyncio.gather(*(person.has(chat_id, total) for person in people))
        for person in people:
            person.client.note_copy(chat_id)
    await rig.note_state({chat_id: users})
    history = rig.record.history()
    asked = [each for each in history.operations if each.invoke.verb == "sync"]
    asked = [each for each in asked if each.invoke.at > began]
    assert not asked, "a feed missed something: a client had to ask for it"
    [chat] = history.chats.values()
    keys = [(m.sender_id, m.key) for m in chat.messages]
    assert len(set(keys)) == len(keys) == total
    verdicts = check(history)
    assert not red(verdicts), "\n".join(str(v) for v in verdicts if not v.ok)


@pytest.mark.long
@pytest.mark.torture
async def test_hundred_writers_in_one_chat_have_dense_numbers_and_no_feed_misses_one(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(250), cluster_rig(tmp_path, nodes=NODES, settings=SETTINGS) as rig:
        began = time.perf_counter()
        await everybody_writes(rig)
        seconds = time.perf_counter() - began
    tally(
        Row(
            "100 writers in one chat",
            f"{NODES} nodes on one PostgreSQL and one Redis, each has everything pushed",
            WRITERS * SENDS,
            0,
            "every send acked, numbers dense, each key once, no feed misses one",
            seconds=seconds,
        )
    )
