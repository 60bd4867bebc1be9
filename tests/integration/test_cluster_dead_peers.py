"""A node's host vanishes and closes nothing: PostgreSQL drops its connections within
seconds, and with them all they hold; the node itself gives up and serves again later. A
node that hangs does not read: the connections that this holds up are dropped, too.
"""

from __future__ import annotations

import asyncio
import signal
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


NOTIFY = """
DO $$ BEGIN
    FOR n IN 1..2000 LOOP PERFORM pg_notify('holdfast_bus', n || repeat('x', 7900)); END LOOP;
END $$
"""
HELD_UP = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'ClientWrite'"
USAGE = "SELECT pg_notification_queue_usage()"


@pytest.mark.long
async def test_node_that_hangs_does_not_hold_up_the_queue_of_notifications(
    tmp_path: Path,
) -> None:
    """PostgreSQL keeps what a listener has not read, for all, and refuses to notify
    when its queue is full. What the others cannot read here they ignore.
    """
    async with asyncio.timeout(100), cluster_rig(tmp_path, nodes=2, with_redis=False) as rig:
        chat_id = await rig.chat("ann", "bob")
        rig.nodes[0].process.send(signal.SIGSTOP)
        await ask(rig.postgres, NOTIFY)
        began = time.monotonic()

        async def is_held_up() -> bool:
            return bool(await ask(rig.postgres, HELD_UP))

        async def goes_on() -> bool:
            return not await is_held_up() and await ask(rig.postgres, USAGE) < 0.0001

        await until(is_held_up)
        assert await ask(rig.postgres, USAGE) > 0.001
        await until(goes_on)
        assert time.monotonic() - began <= DROPPED_SECONDS_MAX
        rig.nodes[0].process.send(signal.SIGCONT)
        async with rig.person("ann", 0).online() as ann, rig.person("bob", 1).online() as bob:
            await ann.say(chat_id, "back")
            await bob.has(chat_id, 1)
