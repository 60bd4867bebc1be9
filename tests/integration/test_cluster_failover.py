"""A cluster whose PostgreSQL fails over, again and again, while people talk: epochs are
raised unless the operator promised that nothing is lost, every copy is that of the
survivor, and no node uses the old primary when it comes back.
"""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import pytest
from cluster_conversation import Conversation, conversation
from cluster_rig import ClusterRig, cluster_rig
from long_tier import times
from postgres_pair import PostgresPair, ask, name_synchronous

from engines import Server
from holdfast.verify.history import CommitsLost

SEED = 1311
NODES = 3
LOSSLESS = "failover of PostgreSQL declared lossless"
UNDECLARED = "failover of PostgreSQL undeclared"
"""Its standby is synchronous, too; the survivor does not wait for another."""
LOSSY = "failover of PostgreSQL that loses commits"
RUNS = {LOSSLESS: 20, UNDECLARED: 10, LOSSY: 20}
PROMISES = {
    LOSSLESS: "epochs unchanged, the old primary not used",
    UNDECLARED: "nothing lost, epochs raised before the first send, the old primary not used",
    LOSSY: "epochs raised before the first send, copies equal the survivor",
}
PAIR = {"max_connections": "300"}
SYNCHRONOUS = {"synchronous_standby_names": "*"}
BASE = "SELECT epoch_base FROM holdfast_chats.cluster"
MESSAGES = """
SELECT c.chat_id, m.sequence, m.message_id
  FROM holdfast_chats.message AS m JOIN holdfast_chats.chat AS c USING (chat)
"""
STATE = "SELECT (count(*), max(position))::text FROM holdfast_chats.message"
UNDER_OLD_EPOCH = """
SELECT count(*) FROM holdfast_chats.message AS m WHERE m.created_at > $1 AND m.position < (
    SELECT max(e.position) FROM holdfast_chats.log_event AS e
     WHERE e.shard = m.shard AND e.kind = 'AllEpochsRaised')
"""


class Failovers:
    """What one run of a kind has seen."""

    def __init__(self, kind: str, pair: PostgresPair, rng: random.Random) -> None:
        self.kind, self._pair, self._rng = kind, pair, rng
        self.served: list[float] = []
        """How long after a promotion the first send was acked."""
        self.lost = 0
        """Messages that PostgreSQL had committed and the survivor has not."""

    async def run(self, rig: ClusterRig, talk: Conversation, number: int) -> None:
        pair = self._pair
        with talk.fault("failover", "durability", "history", "fanout"):
            if self.kind == UNDECLARED:
                await name_synchronous(pair.primary, "*")
                await talk.all_acked()
            await pair.is_streaming()
            base = await pair.ask(BASE)
            if self.kind == LOSSY:
                await self._lose_some(talk, is_dropped=number % 2 == 1)
            await pair.fail_over()
            promoted, at = time.monotonic(), datetime.now(UTC)
            rig.postgres = pair.primary
            if self.kind != LOSSLESS:  # its commits wait for the next standby
                await talk.acked_since(promoted)
                self.served.append(talk.first_ack(talk.acked_at, promoted) - promoted)
            await pair.bring_back_old()
            if self.kind == LOSSY:
                await self._note_losses(rig, promoted)
            await self._old_primary_is_not_used()
            await pair.rebuild()
            await talk.all_acked()
        await self._check_epochs(base, at)

    async def _lose_some(self, talk: Conversation, *, is_dropped: bool) -> None:
        """The standby lags behind; or it was synchronous, hangs and is dropped."""
        if is_dropped:
            await name_synchronous(self._pair.primary, "*")
        await self._pair.cut_standby()
        if is_dropped:
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
            await name_synchronous(self._pair.primary, "")
        await talk.all_acked()

    async def _note_losses(self, rig: ClusterRig, promoted: float) -> None:
        """What the old primary has and the survivor has not."""
        assert self._pair.old is not None
        had_before, has_now = (
            await messages_of(self._pair.old),
            await messages_of(self._pair.primary),
        )
        gone = had_before - has_now
        assert gone, "nothing was lost"
        self.lost += len(gone)
        kept = min(sequence for _, sequence, _ in gone) - 1
        [chat_id] = {chat_id for chat_id, _, _ in gone}
        ids = [message_id for _, _, message_id in gone]
        rig.record.note(CommitsLost(at=promoted, chat_id=chat_id, kept=kept, message_ids=ids))

    async def _old_primary_is_not_used(self) -> None:
        """It is there again, also while the survivor is not."""
        pair = self._pair
        assert pair.old is not None
        before = await ask(pair.old, STATE)
        await pair.restart_primary()
        assert await ask(pair.old, STATE) == before
        assert await ask(pair.old, BASE) < await pair.ask(BASE) or self.kind == LOSSLESS

    async def _check_epochs(self, base: int, promoted: datetime) -> None:
        now = await self._pair.ask(BASE)
        if self.kind == LOSSLESS:
            assert now == base
        else:
            assert now > base
            assert await self._pair.ask(UNDER_OLD_EPOCH, promoted) == 0


@pytest.mark.long
@pytest.mark.torture
@pytest.mark.parametrize("kind", RUNS)
async def test_failovers_keep_or_raise_epochs_and_copies_equal_the_survivor(
    tmp_path: Path, kind: str
) -> None:
    count, rng = times(RUNS[kind]), random.Random(SEED)
    is_lossless = kind == LOSSLESS
    settings = {"cluster.failover": "lossless" if is_lossless else "undeclared"}
    with PostgresPair.started(**PAIR, **(SYNCHRONOUS if is_lossless else {})) as pair:
        failovers = Failovers(kind, pair, rng)
        chosen = {"cluster.postgres": pair.url, **settings}
        async with (
            asyncio.timeout(60 + 30 * count),
            cluster_rig(tmp_path, nodes=NODES, database=pair.primary, settings=chosen) as rig,
            conversation(rig, {f"p{n}": n for n in range(NODES)}, SEED, pause_seconds=0.05) as talk,
        ):
            for number in range(count):
                await failovers.run(rig, talk, number)
    figures = {"commits lost by PostgreSQL": f"{failovers.lost}"} if failovers.lost else {}
    if failovers.served:
        figures["serving after a promotion"] = f"{max(failovers.served):.2f} s"
    talk.count(kind, count, SEED, promises=PROMISES[kind], **figures)


async def messages_of(server: Server) -> set[tuple[str, int, str]]:
    """The messages that a server has: chat, sequence, id."""
    connection = await asyncpg.connect(server.url)
    try:
        return {tuple(row) for row in await connection.fetch(MESSAGES)}
    finally:
        await connection.close()
