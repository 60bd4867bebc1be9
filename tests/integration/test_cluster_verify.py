"""``holdfast verify`` against a cluster: by its proxy, by its nodes, and while it breaks a
promise.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
from cluster_rig import ClusterRig, cluster_rig
from program import Program, Ran
from store_rigs import without_triggers
from work_rigs import until

SECONDS = "3"
LAST_CHAT = "SELECT max(chat) FROM holdfast_chats.chat"
HAS_TEXTS = "SELECT count(*) > 5 FROM holdfast_chats.message WHERE kind = 'text' AND chat > $1"
LOSE_ONE = (
    "DELETE FROM holdfast_chats.message WHERE ctid = (SELECT ctid FROM holdfast_chats.message"
    " WHERE kind = 'text' AND chat > {} ORDER BY chat, sequence LIMIT 1)"
)


@asynccontextmanager
async def verified_rig(folder: Path) -> AsyncIterator[tuple[ClusterRig, Program, Path]]:
    """Three nodes behind NGINX, the commands of an operator, and a tenant's key."""
    async with asyncio.timeout(150), cluster_rig(folder, with_nginx=True) as rig:
        programs = [node.program for node in rig.nodes]
        operator = next(p for p in programs if (p.state_dir / "secrets.json").exists())
        made = await asyncio.to_thread(
            operator.ok, "key", "create", "tenant", "--tenant", "acme", "--label", "v", "--json"
        )
        key = folder / "tenant.key"
        key.write_text(json.loads(made)["secret"])
        key.chmod(0o600)
        yield rig, operator, key


async def verify(operator: Program, key: Path, *urls: str) -> tuple[Ran, Any]:
    options = ("--token-file", str(key), "--seconds", SECONDS, "--json")
    done = await asyncio.to_thread(operator.run, "verify", *urls, *options)
    return done, json.loads(done.stdout)


async def test_cluster_is_judged_by_its_proxy_by_its_nodes_and_while_it_loses_a_message(
    tmp_path: Path,
) -> None:
    async with verified_rig(tmp_path) as (rig, operator, key):
        nodes = [node.url for node in rig.nodes]
        for urls in ([rig.url], nodes):
            done, said = await verify(operator, key, *urls)
            assert done.returncode == 0 and said["kept"], said
            judged = {p["number"] for p in said["promises"] if p["kept"] and p["facts"]}
            assert judged == {1, 2, 3, 4, 5, 7, 8, 9, 12}
        connection = await asyncpg.connect(rig.postgres.url)
        last = await connection.fetchval(LAST_CHAT)
        verifying = asyncio.create_task(verify(operator, key, *nodes))
        await until(lambda: connection.fetchval(HAS_TEXTS, last))
        await connection.close()
        await without_triggers(rig.postgres.url, LOSE_ONE.format(last))
        done, said = await verifying
        assert done.returncode == 1 and not said["kept"]
        assert 1 in {p["number"] for p in said["promises"] if not p["kept"]}
