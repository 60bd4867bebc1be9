"""A proof of a rollback raises the epoch in the store, once, on the record."""

from __future__ import annotations

import random

from scripted_durability import ANNA, BELA, CHAT, create_chat
from structlog.testing import capture_logs

from holdfast.access.proofs import CursorProofs
from holdfast.clock import Ids
from holdfast.history.history import ChatHistory
from holdfast.ingest.durability import EpochRaiser, StoreDurability
from holdfast.message import Cursor
from holdfast.store.memory import MemoryStore
from proof.virtual_loop import LoopClock


async def test_a_rollback_ends_as_a_recorded_act_and_a_reset() -> None:
    store, clock = MemoryStore(), LoopClock()
    await create_chat(store, ANNA, BELA)
    epoch = (await store.heads([CHAT]))[CHAT].epoch
    raiser = EpochRaiser(StoreDurability(store, clock), clock, Ids(clock, random.Random(1)))
    proofs, beyond = CursorProofs(b"test"), Cursor(epoch, 3)
    history = ChatHistory(store, raiser, proofs, clock)
    with capture_logs() as logs:
        page = await history.sync(
            BELA, CHAT, beyond, 10, proof=proofs.of(BELA.tenant, CHAT, beyond)
        )
    assert [(entry["log_level"], entry["user_id"], entry["cursor"]) for entry in logs] == [
        ("critical", "bela", 3)
    ]
    assert page.reset and page.epoch == epoch + 1
    await raiser(BELA, CHAT, epoch, clock.monotonic() + 5)
    assert (await store.heads([CHAT]))[CHAT].epoch == epoch + 1
    (record,) = (await store.audit(None, 10)).records
    assert record.actor == "holdfast" and "bela" in record.reason and record.target == CHAT
