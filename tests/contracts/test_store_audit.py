"""The audit log of every store: ids, and a hash chain for each node."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from store_rigs import Rig, create, on_every_store, operator

from holdfast.store.audit_chain import AuditChains, hash_of
from holdfast.store.commands import HaltChat
from holdfast.store.contract import AuditRecord


async def fill(store: Any) -> list[AuditRecord]:
    """Records of two nodes, by acts that change a chat and by others."""
    await create(store)
    for n, node in enumerate(["a", "b", "a", "a", "b"]):
        act = replace(operator(reason=f"är {n}"), message_id=f"msg_{n}", node=node)
        if n == 2:
            await store.change(HaltChat(act, "chat_a"))
        else:
            await store.record(act, "key_issued", f"key {n}", "{}")
    return list((await store.audit(None, 100)).records)


@on_every_store
async def test_records_of_each_node_are_a_chain_and_have_the_ids_of_their_acts(
    store: Any, rig: Rig
) -> None:
    records = await fill(store)
    assert [(r.number, r.record_id, r.node) for r in records] == [
        (n + 1, f"aud_{n}", node) for n, node in enumerate("abaab")
    ]
    chains = AuditChains()
    assert chains.first_break(records[:3]) is None
    assert chains.first_break(records[3:]) is None
    assert chains.last == {"a": records[3].hash, "b": records[4].hash}
    assert chains.hashes == {record.hash for record in records}


@on_every_store
async def test_record_that_was_changed_removed_or_inserted_breaks_its_chain(
    store: Any, rig: Rig
) -> None:
    records = await fill(store)
    for field in AuditRecord.__struct_fields__[1:]:
        changed = replace(records[2], **{field: "other"})
        broken = AuditChains().first_break([*records[:2], changed, *records[3:]])
        assert broken is not None and broken.number in (3, 4), field
    removed = AuditChains().first_break([*records[:2], *records[3:]])
    assert removed == records[3]
    assert AuditChains().first_break([records[0], *records]) == records[0]
    emptied = replace(records[2], hash="")
    assert AuditChains().first_break([*records[:2], emptied]) == emptied


def test_records_older_than_the_chains_are_in_front_of_them() -> None:
    old = AuditRecord(1, "at", "op", "act", "chat", "why", "{}", "", "", "")
    new = replace(old, number=2, hash=hash_of(old, ""))
    chains = AuditChains()
    assert chains.first_break([old, replace(old, number=2), new]) is None
    assert chains.first_break([old]) == old, "none comes after them"
