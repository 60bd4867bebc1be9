"""The synchronous standby of a cluster's PostgreSQL hangs: a commit is not confirmed, so
nobody knows. People are told so in time, and repeat it until they know.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from cluster_conversation import conversation
from cluster_rig import cluster_rig
from long_tier import times
from postgres_pair import name_synchronous

from holdfast.verify.history import Unknown

SEED = 1323
NODES = 2
HANGING_SECONDS = (5.0, 7.0)
"""Longer than any request may be open."""


@pytest.mark.long
@pytest.mark.torture
async def test_standby_that_hangs_makes_sends_unknown_and_none_is_lost_or_stored_twice(
    tmp_path: Path,
) -> None:
    count, rng = times(10), random.Random(SEED)
    async with (
        asyncio.timeout(60 + 20 * count),
        cluster_rig(tmp_path, nodes=NODES) as rig,
        conversation(rig, {f"p{n}": n % NODES for n in range(4)}, SEED, pause_seconds=0.1) as talk,
    ):
        for _ in range(count):
            with talk.fault("synchronous standby hangs", "durability"):
                await name_synchronous(rig.postgres, "nobody")
                await asyncio.sleep(rng.uniform(*HANGING_SECONDS))
                await name_synchronous(rig.postgres, "")
                await talk.all_acked()
    ends = [each.end for each in rig.record.history().operations]
    unknown = sum(isinstance(end, Unknown) and end.reason == "answered" for end in ends)
    assert unknown >= count, "a commit that no standby confirms is unknown"
    figures = {"answered unknown": f"{unknown}"}
    talk.count("synchronous standby hangs", count, SEED, **figures)
