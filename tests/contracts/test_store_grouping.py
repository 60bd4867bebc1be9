"""What every store says about groups and lanes, and keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from store_rigs import Rig, acked, create, draft, on_every_store

from holdfast.drivers.sqlite.database import SqliteSettings
from holdfast.store.contract import ONE_LANE, Grouping, shard_of
from holdfast.store.memory import MemoryStore
from holdfast.store.sqlite import SqliteStore

CHATS = [f"chat_{n}" for n in range(200)]


@on_every_store
async def test_store_that_groups_any_chats_has_one_lane_and_others_several(
    store: Any, rig: Rig
) -> None:
    grouping: Grouping = store.grouping
    lanes = {store.lane(chat_id) for chat_id in CHATS}
    assert (grouping.by == "any") == (lanes == {0}), "a chat that is not known has a lane too"
    assert (grouping.by == "any") == (grouping.at_once == 1)
    assert [store.lane(chat_id) for chat_id in CHATS] == [store.lane(chat_id) for chat_id in CHATS]
    assert min(grouping.sends_max, grouping.bytes_max, grouping.reads_at_once) > 0


@on_every_store
async def test_group_of_the_size_that_the_store_names_is_one_commit(store: Any, rig: Rig) -> None:
    lane = store.lane(CHATS[0])
    chats = [chat_id for chat_id in CHATS if store.lane(chat_id) == lane][:3]
    if store.grouping.by == "chat":
        chats = chats[:1]
    for chat_id in chats:
        await create(store, chat_id=chat_id)
    sends_max, content = store.grouping.sends_max, "x" * 1024
    assert sends_max * len(content) <= store.grouping.bytes_max
    outcomes = await store.append(
        [draft(f"k{n}", content, chat_id=chats[n % len(chats)]) for n in range(sends_max)]
    )
    assert sum(acked(outcome).sequence == 1 for outcome in outcomes) == len(chats)
    heads = await store.heads(chats)
    assert sum(head.sequence for head in heads.values()) == sends_max


def test_embedded_store_reads_more_at_once_with_more_readers(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    assert SqliteStore(path).grouping == ONE_LANE, "with its two readers"
    assert SqliteStore(path, SqliteSettings(readers=4)).grouping.reads_at_once == 16


def test_memory_store_of_several_shards_has_a_lane_for_each() -> None:
    store = MemoryStore(shards=4)
    assert {store.lane(chat_id) for chat_id in CHATS} == {0, 1, 2, 3}
    assert (store.grouping.by, store.grouping.at_once) == ("shard", 4)


def test_shard_of_a_chat_is_the_same_in_every_release() -> None:
    assert [shard_of(chat_id, 16) for chat_id in CHATS[:8]] == [6, 0, 10, 12, 15, 9, 3, 5]
