"""Operating a cluster of real nodes: names, connections, roles, and its status."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest
from cluster_rig import ClusterNode, ClusterRig, cluster_rig
from program import Program, Ran
from redis.asyncio import Redis
from work_rigs import until

from engines import postgres
from engines.fixtures import had
from holdfast.cli.rest import RestClient
from holdfast.errors import Unavailable

NAMED = [{"server.node_id": "east"}, {"server.node_id": "west"}]


def config_of(node: ClusterNode, **changes: Any) -> Path:
    """A settings file like the node's."""
    file = node.program.state_dir.parent / "copy.yaml"
    tree: dict[str, Any] = {}
    for path, value in {**node.settings, **changes}.items():
        *parents, leaf = path.split(".")
        group = tree
        for part in parents:
            group = group.setdefault(part, {})
        group[leaf] = value
    file.write_text(json.dumps(tree))
    return file


def admin_key(rig: ClusterRig) -> str:
    """Of the node that started first."""
    for node in rig.nodes:
        secrets = node.program.state_dir / "secrets.json"
        if secrets.exists():
            return str(json.loads(secrets.read_text())["admin_key"])
    raise AssertionError("no node has the admin key")


def status_of(rig: ClusterRig, node: int, *options: str) -> Ran:
    file = rig.nodes[node].program.state_dir.parent / "credential"
    file.write_text(admin_key(rig))
    program = rig.nodes[node].program
    where = ("--token-file", str(file), "--url", program.url)
    return program.run("status", "--cluster", *options, *where)


async def test_second_node_with_the_name_of_a_living_one_does_not_start(tmp_path: Path) -> None:
    async with asyncio.timeout(100), cluster_rig(tmp_path, nodes=1, each=NAMED[:1]) as rig:
        east = rig.nodes[0]
        other = Program(tmp_path / "copy")
        copied = {"server.port": other.port, "server.state_dir": str(other.state_dir)}
        config = config_of(east, **copied)
        failed = await asyncio.to_thread(other.run_process, "serve", "-c", str(config))
        assert failed.returncode != 0
        assert f"which runs at {east.url}, has the name east" in failed.stderr
        assert "server.node_id of its own" in failed.stderr
        await east.kill()
        await east.start()  # under its name, at once


async def test_node_for_which_postgres_has_too_few_connections_does_not_start(
    tmp_path: Path,
) -> None:
    small = had("postgres", lambda: postgres.start(max_connections="40"))
    try:
        keys = tmp_path / "keys"
        keys.write_text("k" * 32)
        keys.chmod(0o600)
        program = Program(tmp_path / "state")
        failed = await asyncio.to_thread(
            program.run_process,
            *("serve", "--set", f"cluster.postgres={small.url}"),
            *("--set", f"access.tokens.secret_file={keys}"),
        )
        assert failed.returncode != 0
        assert "has 37 connections for nodes, and 48 are needed" in failed.stderr
        assert "raise max_connections of PostgreSQL by 11 or more" in failed.stderr
    finally:
        small.stop()


async def backends(rig: ClusterRig, last_statement: str = "") -> int:
    """The connections of nodes, perhaps those only whose last statement began so."""
    connection = await asyncpg.connect(rig.postgres.url)
    taken = await connection.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
        " AND pid <> pg_backend_pid() AND starts_with(query, $1)",
        last_statement,
    )
    await connection.close()
    return int(taken)


async def test_node_opens_the_connections_of_sends_first_and_none_beyond_its_record(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(100), cluster_rig(tmp_path, nodes=1, with_redis=False) as rig:
        assert await backends(rig, "CALL holdfast_chats.append") == 8, "and their plans are made"
        chats = [await rig.chat("ann", "bob") for _ in range(8)]
        async with rig.person("ann").online() as ann:
            rest = RestClient(rig.url, admin_key(rig))
            asking = [asyncio.to_thread(rest.get, "/admin/audit") for _ in range(40)]
            sends = [ann.say(chat_id, f"{n}") for n in range(40) for chat_id in chats]
            await asyncio.gather(*asking, *sends)
            taken = await backends(rig)
        [node] = (await asyncio.to_thread(rest.get, "/admin/cluster"))["nodes"]
        assert 20 < taken <= node["connections"] == 48


async def test_status_of_a_cluster_names_every_node_and_what_they_share(tmp_path: Path) -> None:
    each = [{**named, "api.body_seconds_max": 9 + n} for n, named in enumerate(NAMED)]
    async with (
        asyncio.timeout(100),
        cluster_rig(tmp_path, nodes=2, links="proxies", each=each) as rig,
    ):

        def found() -> dict[str, Any]:
            shown = status_of(rig, 1, "--json")
            return dict(json.loads(shown.stdout))

        async def has_leases() -> bool:
            names = {lease["name"] for lease in (await asyncio.to_thread(found))["leases"]}
            return {"registry sweep", "reader.webhooks"} <= names

        await until(has_leases)
        seen = await asyncio.to_thread(found)
        assert [node["name"] for node in seen["nodes"]] == ["east", "west"]
        assert [node["address"] for node in seen["nodes"]] == [
            f"http://127.0.0.1:{node.settings['server.port']}" for node in rig.nodes
        ]
        assert seen["differing_settings"]["api.body_seconds_max"] == {"east": "9.0", "west": None}
        assert seen["database"]["epoch_base"] == 0 and seen["database"]["timeline"] == 1
        assert seen["database"]["connections"][0] == sum(n["connections"] for n in seen["nodes"])
        assert seen["registry"] == {"engine": "redis", "state": "up", "detail": ""}
        assert {lease["holder"] for lease in seen["leases"]} <= {"east", "west"}
        assert "nodes differ in api.body_seconds_max" in seen["problems"]

        assert rig.redis is not None
        async with Redis.from_url(rig.redis.url) as redis:
            await redis.config_set("maxmemory", "1")  # reads are answered, writes are not

        async def is_registry_down() -> bool:
            return bool((await asyncio.to_thread(found))["registry"]["state"] == "down")

        await until(is_registry_down)
        shown = await asyncio.to_thread(status_of, rig, 1)
        assert shown.returncode == 1
        assert "problem: the registry (redis) is down: " in shown.stderr
        assert "east" in shown.stdout and "lease registry sweep" in shown.stdout
        rig.nodes[1].proxy("postgres").set(down=True)
        shown = await asyncio.to_thread(status_of, rig, 1)
        assert re.search(r"problem: PostgreSQL does not answer \(.+\): no node", shown.stderr)


async def test_node_that_was_killed_is_shown_as_gone_and_one_that_stopped_is_not(
    tmp_path: Path,
) -> None:
    async with (
        asyncio.timeout(100),
        cluster_rig(tmp_path, nodes=2, with_redis=False, each=NAMED) as rig,
    ):
        west = rig.nodes[1]
        apart = "nodes have the role streaming and share no Redis"
        assert any(apart in node.log.read_text() for node in rig.nodes)
        shown = await asyncio.to_thread(status_of, rig, 0)
        assert shown.returncode == 1 and f"problem: 2 {apart}" in shown.stderr
        await west.kill()
        connection = await asyncpg.connect(rig.postgres.url)
        await connection.execute(
            "UPDATE holdfast_chats.node SET renewed_at = renewed_at - interval '60 s'"
            " WHERE name = 'west'"
        )
        shown = await asyncio.to_thread(status_of, rig, 0)
        assert shown.returncode == 1 and "problem: west is gone since 20" in shown.stderr
        [row] = [line.split() for line in shown.stdout.splitlines() if line.startswith("west")]
        assert row[2] == "gone" and apart not in shown.stderr, "one node has the role"
        await west.start()
        await west.stop()
        names = await connection.fetch("SELECT name FROM holdfast_chats.node")
        await connection.close()
        assert [row["name"] for row in names] == ["east"]


async def test_start_that_is_refused_leaves_no_record(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(100),
        cluster_rig(tmp_path, nodes=1, with_redis=False, each=NAMED[:1]) as rig,
    ):
        keys = tmp_path / "other.keys"
        keys.write_text("o" * 32)
        keys.chmod(0o600)
        other = Program(tmp_path / "other")
        config = config_of(
            rig.nodes[0],
            **{
                "server.node_id": "west",
                "server.port": other.port,
                "server.state_dir": str(other.state_dir),
                "access.tokens.secret_file": str(keys),
            },
        )
        failed = await asyncio.to_thread(other.run_process, "serve", "-c", str(config))
        assert failed.returncode != 0 and "token" in failed.stderr
        connection = await asyncpg.connect(rig.postgres.url)
        names = await connection.fetch("SELECT name FROM holdfast_chats.node")
        await connection.close()
        assert [row["name"] for row in names] == ["east"]


async def refused(call: Callable[[], Any], role: str) -> None:
    with pytest.raises(Unavailable, match=f"does not have the role {role}"):
        await asyncio.to_thread(call)


async def readiness(node: ClusterNode, key: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{node.url}/health/ready") as answer,
    ):
        return dict(await answer.json())


async def test_nodes_with_different_roles_do_their_own_and_refuse_the_rest(
    tmp_path: Path,
) -> None:
    each = [
        {"server.node_id": "front", "server.roles": ["gateway", "ingest"]},
        {"server.node_id": "back", "server.roles": ["work"]},
        {"server.node_id": "desk", "server.roles": ["admin", "ingest"]},
    ]
    async with asyncio.timeout(100), cluster_rig(tmp_path, nodes=3, each=each) as rig:
        front, back, desk = rig.nodes
        key = admin_key(rig)
        chat_id = await rig.chat("ann", "bob")
        async with rig.person("ann", 0).online() as ann:
            await ann.say(chat_id, "hello")
            sent = await rig.ask("bob", "GET", f"/v1/chats/{chat_id}/messages", node=2)
            assert [message["content"] for message in sent["messages"]] == ["hello"]

        await refused(lambda: RestClient(front.url, key).get("/admin/status"), "admin")
        await refused(lambda: RestClient(back.url, rig.token("ann")).get("/v1/chats"), "ingest")
        replies = RestClient(desk.url, rig.token("ann"))
        await refused(lambda: replies.delete("/v1/replies", "rep_1"), "streaming")
        async with aiohttp.ClientSession() as session:
            for node in (back, desk):
                with pytest.raises(aiohttp.WSServerHandshakeError) as error:
                    await session.ws_connect(f"{node.url}/v1/ws")
                assert error.value.status == 503
            async with session.post(f"{back.url}/v1/chats", json={}) as answer:
                assert answer.status == 503 and "Retry-After" not in answer.headers
                assert (await answer.json())["error"]["retryable"] is False
        for node, shown in ((front, {"registry"}), (back, set()), (desk, set())):
            found = await readiness(node, key)
            assert found["status"] == "ready"
            named = found["dependencies"].keys()
            assert named & {"registry", "replies"} == shown and {"store", "jobs"} <= named

        desk_rest = RestClient(desk.url, key)
        seen = await asyncio.to_thread(desk_rest.get, "/admin/cluster")
        roles = {node["name"]: node["roles"] for node in seen["nodes"]}
        assert roles == {node["server.node_id"]: node["server.roles"] for node in each}
        assert "no node has the role streaming" in seen["problems"]
        holders = {lease["name"]: lease["holder"] for lease in seen["leases"]}
        assert holders["reader.webhooks"] == "back" and holders["registry sweep"] == "front"
        for node in rig.nodes:
            await node.stop()
            assert "Traceback" not in node.log.read_text()


async def test_operator_raises_all_epochs_after_a_restore_in_place(tmp_path: Path) -> None:
    async with asyncio.timeout(100), cluster_rig(tmp_path, nodes=2, with_redis=False) as rig:
        chat_id = await rig.chat("ann", "bob")
        file = tmp_path / "credential"
        file.write_text(admin_key(rig))
        where = ("--token-file", str(file), "--url", rig.nodes[1].url)
        async with rig.person("ann", 0).online() as ann:
            await ann.say(chat_id, "before")
            raised = await asyncio.to_thread(
                rig.nodes[1].program.ok,
                *("chat", "raise-epochs", "--yes", "--reason", "restored", "--json", *where),
            )
            base = json.loads(raised)["epoch_base"]
            assert base > 1_000_000_000
            await until(lambda: "fanout.epochs_raised" in rig.nodes[0].log.read_text())
            await ann.say(chat_id, "after")
            await ann.has(chat_id, 2)
        rest = RestClient(rig.nodes[1].url, admin_key(rig))
        records = (await asyncio.to_thread(rest.get, "/admin/audit"))["records"]
        found = [(each["action"], each["reason"]) for each in records if "epochs" in each["action"]]
        assert found == [("epochs.raise", "restored"), ("store.raise_epochs", "restored")]
        chat = await asyncio.to_thread(rest.get, f"/admin/chats/{chat_id}")
        assert chat["chat"]["epoch"] > base


HANG_SEEN_SECONDS_MAX = 4.0
"""Two looks at an idle store, half a second apart, and 2 s for its answer; the rest is
for a busy machine.
"""
RETURN_SEEN_SECONDS_MAX = 2.0


async def ready_is(node: ClusterNode, status: int) -> float:
    """How long it takes until it says so."""
    began = time.monotonic()
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{node.url}/health/ready") as answer:
                if answer.status == status:
                    return time.monotonic() - began
            await asyncio.sleep(0.02)


async def test_idle_node_whose_postgres_hangs_is_soon_not_ready_and_still_tells_its_status(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(100), cluster_rig(tmp_path, nodes=1, with_redis=False) as rig:
        [node], rest = rig.nodes, rig.operator(0)
        with postgres.stopped(rig.postgres):
            assert await ready_is(node, 503) <= HANG_SEEN_SECONDS_MAX
            began = time.monotonic()
            found = await asyncio.to_thread(rest.get, "/admin/status")
            shown = await asyncio.to_thread(status_of, rig, 0)
            assert time.monotonic() - began <= 5, "all of it, each part within its time"
            assert found["ready"] is False and found["dependencies"]["store"] == "down"
            letters = ["dead_letters_of_fanout", "dead_letters_of_jobs"]
            assert found["unknown"] == ["halted_chats", *letters, "nodes", "fanout_lag"]
            assert "in time" in found["trouble"]["store"]
            assert "problem: PostgreSQL does not answer" in shown.stderr
        assert await ready_is(node, 200) <= RETURN_SEEN_SECONDS_MAX
        assert (await asyncio.to_thread(rest.get, "/admin/status"))["unknown"] == []


async def test_backup_and_restore_of_a_node_of_a_cluster_are_refused(tmp_path: Path) -> None:
    async with asyncio.timeout(100), cluster_rig(tmp_path, nodes=1, with_redis=False) as rig:
        node, file = rig.nodes[0], tmp_path / "credential"
        file.write_text(admin_key(rig))
        taken = await asyncio.to_thread(
            node.program.run, "backup", "--token-file", str(file), "--url", node.url
        )
        assert taken.returncode == 1 and "pg_dump" in taken.stderr
        assert not (node.program.state_dir / "backups").exists()
        await node.stop()
        restored = await asyncio.to_thread(
            node.program.run, "restore", str(tmp_path), "-c", str(config_of(node))
        )
        assert restored.returncode == 1 and "holdfast chat raise-epochs" in restored.stderr
