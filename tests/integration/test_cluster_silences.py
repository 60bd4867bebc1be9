"""Silences of alerts in a cluster of real nodes."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from cluster_rig import cluster_rig
from work_rigs import until

from holdfast.cli.rest import RestClient

PAUSE_SECONDS = 0.1
"""Between two looks, of the nodes at their silences, and of the test: a key has a rate."""


async def test_silence_made_at_one_node_holds_on_every_node_and_after_a_kill(
    tmp_path: Path,
) -> None:
    alert = {"alert": "HoldfastJobsOld", "reason": "import"}
    async with (
        asyncio.timeout(100),
        cluster_rig(tmp_path, nodes=2, with_redis=False, gauges_seconds=PAUSE_SECONDS) as rig,
    ):
        east, west = rig.operator(0), rig.operator(1)

        async def silences(rest: RestClient) -> list[Any]:
            return list((await asyncio.to_thread(rest.get, "/admin/alerts"))["silences"])

        async def has(rest: RestClient, expected: list[Any]) -> bool:
            await asyncio.sleep(PAUSE_SECONDS)
            return await silences(rest) == expected

        body = {**alert, "seconds": 3600}
        made = await asyncio.to_thread(partial(east.post, "/admin/alerts/silence", body=body))
        await until(lambda: has(west, [made]))
        await rig.nodes[0].kill()
        await rig.nodes[0].start()
        assert await silences(east) == [made]
        await asyncio.to_thread(partial(west.post, "/admin/alerts/unsilence", body=alert))
        await until(lambda: has(east, []))
