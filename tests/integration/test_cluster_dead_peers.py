"""A node's host vanishes and closes nothing: PostgreSQL drops its connections within
seconds, and with them all they hold; the node itself gives up and serves again later.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster_links import NamespaceLink, own_network
from cluster_rig import cluster_rig
from postgres_pair import ask
from work_rigs import until

from engines import Server
from engines.fixtures import had

DROPPED_SECONDS_MAX = 15.0
"""Idle for 5 s, then three probes 2 s apart; and what a statement takes."""
CAUGHT_UP_SECONDS_MAX = 10.0
BACKENDS = "SELECT count(*) FROM pg_stat_activity WHERE client_addr = $1::inet"


async def is_dropped(server: Server, host: str) -> bool:
    return bool(await ask(server, BACKENDS, host) == 0)


@pytest.mark.long
async def test_connections_of_a_host_that_is_gone_are_dropped_and_it_comes_back(
    tmp_path: Path,
) -> None:
    """No proxy can show this: it would answer for a host that is gone."""
    with ExitStack() as stack:
        network = had("network namespace", lambda: stack.enter_context(own_network()))
        async with asyncio.timeout(100), cluster_rig(tmp_path, nodes=2, links=network) as rig:
            chat_id = await rig.chat("ann", "bob")
            gone = rig.nodes[0].place.links["postgres"]
            assert isinstance(gone, NamespaceLink)
            async with rig.person("ann", 0).online() as ann, rig.person("bob", 1).online() as bob:
                await ann.say(chat_id, "hello")
                connections = await ask(rig.postgres, BACKENDS, gone.far)
                assert connections > 10, "those of every part"
                gone.cut("both")
                began = time.monotonic()
                await bob.say(chat_id, "the others go on")
                await until(lambda: is_dropped(rig.postgres, gone.far))
                assert time.monotonic() - began <= DROPPED_SECONDS_MAX
                gone.heal()
                healed = time.monotonic()
                await asyncio.gather(ann.say(chat_id, "back"), ann.has(chat_id, 2))
                assert time.monotonic() - healed <= CAUGHT_UP_SECONDS_MAX
