"""``holdfast audit check``: what it follows, and what it says about a log that is not
whole.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from store_rigs import operator

from holdfast.cli.audit import follow
from holdfast.errors import StateCorrupted
from holdfast.store.contract import AuditRecord
from holdfast.store.memory import MemoryStore


async def pages() -> list[list[AuditRecord]]:
    store = MemoryStore()
    for n in range(6):
        act = replace(operator(reason="a drill"), node="ab"[n % 2])
        await store.record(act, "key_issued", f"key {n}")
    records = list((await store.audit(None, 10)).records)
    return [records[:4], records[4:]]


async def test_whole_log_is_counted_and_the_last_hash_of_each_node_shown() -> None:
    first, second = await pages()
    assert follow([first, second], [first[0].hash[:12]]) == (
        6,
        {"a": second[0].hash, "b": second[1].hash},
    )


async def test_changed_record_is_named_with_what_it_was_about() -> None:
    first, second = await pages()
    changed = [replace(second[0], target="another key"), second[1]]
    with pytest.raises(StateCorrupted, match=r"record 5 .*key_issued of another key.*chain of a"):
        follow([first, changed], ())


async def test_hash_that_was_there_once_and_is_gone_is_named() -> None:
    first, second = await pages()
    assert follow([first], [first[3].hash]) == (4, {"a": first[2].hash, "b": first[3].hash})
    with pytest.raises(StateCorrupted, match=f"hash {second[1].hash}: records were removed"):
        follow([first], [second[1].hash])
