"""Nodes behind NGINX are restarted and upgraded one after the other while people talk,
by the commands of the guide.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
from aiohttp import web
from cluster_conversation import conversation
from cluster_rig import ClusterRig, cluster_rig
from guides import blocks
from next_release import VERSION, write_next_release
from program import ROOT, Program

from engines import free_port
from holdfast.store.postgres.schema import SCHEMA

SEED = 13
PEOPLE = dict.fromkeys(("ann", "bob", "cal"))
"""Through NGINX."""
RECONNECT_SECONDS_MAX = 5.0
"""The longest time between two acks of a person: a reconnect, on a busy machine."""
RUN_SECONDS_MAX = 150.0

pytestmark = pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("bash")), reason="the guides use curl and a shell"
)


@asynccontextmanager
async def machines(rig: ClusterRig, release: Path) -> AsyncIterator[str]:
    """The machines of the nodes: ``restart`` and ``install_release`` of the guide."""
    nodes = {node.url: node for node in rig.nodes}

    async def restart(request: web.Request) -> web.Response:
        node = nodes[request.query["node"]]
        await node.stop()
        node.begin()
        return web.Response()

    async def install_release(request: web.Request) -> web.Response:
        path = (release, ROOT / "tests", ROOT / "tests" / "support")
        environment = {"PYTHONPATH": os.pathsep.join(map(str, path))}
        nodes[request.query["node"]].environment = environment
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/restart", restart), web.post("/install_release", install_release)])
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def tools(folder: Path, url: str) -> Path:
    """The commands that the guide uses."""
    folder.mkdir()
    scripts = {
        name: f'curl -sf -X POST -G --data-urlencode "node=$1" "{url}/{name}"'
        for name in ("restart", "install_release")
    }
    scripts["holdfast"] = f'exec "{sys.executable}" -m holdfast.cli "$@"'
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def operator(rig: ClusterRig) -> Program:
    """On the machine of the node that made the first admin key."""
    programs = [node.program for node in rig.nodes]
    return next(p for p in programs if (p.state_dir / "secrets.json").exists())


async def run_guide(program: Program, commands: Path, nodes: str) -> str:
    environment = {
        **program.environment,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "NODES": nodes,
    }
    script = "\n".join(blocks("rolling-upgrade.md"))
    process = await asyncio.create_subprocess_exec(
        *("bash", "-e", "-c", script),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    except BaseException:
        process.kill()
        raise
    assert process.returncode == 0, said.decode()
    return said.decode()


@pytest.mark.long
async def test_guide_restarts_and_upgrades_every_node_and_nobody_loses_anything(
    tmp_path: Path,
) -> None:
    """No fault is declared to the checkers: a node that stops keeps every promise."""
    release = write_next_release(tmp_path / "next")
    async with (
        asyncio.timeout(RUN_SECONDS_MAX),
        cluster_rig(tmp_path, with_nginx=True) as rig,
        machines(rig, release) as url,
        conversation(rig, PEOPLE, SEED) as talk,
    ):
        began = time.monotonic()
        commands = tools(tmp_path / "bin", url)
        nodes = " ".join(node.url for node in rig.nodes)
        said = await run_guide(operator(rig), commands, nodes)
        assert said.count(VERSION) == len(rig.nodes), said
        await talk.acked_since(time.monotonic())
        pauses = {user: talk.longest_pause(user, began) for user in PEOPLE}
        assert max(pauses.values()) <= RECONNECT_SECONDS_MAX, pauses
        assert await written_by(rig) == {1, 2}
        assert await schema_version(rig) == SCHEMA.version + 1
    figures = {"longest pause": f"{max(pauses.values()):.2f} s"}
    promises = "two releases beside each other, no fault declared"
    restarts = 2 * len(rig.nodes)
    talk.count("rolling restart and upgrade", restarts, SEED, promises=promises, **figures)


async def written_by(rig: ClusterRig) -> set[int]:
    """The releases whose nodes stored messages."""
    rows = await _fetch(rig, "SELECT DISTINCT release FROM holdfast_chats.message")
    return {row[0] for row in rows}


async def schema_version(rig: ClusterRig) -> int:
    return int((await _fetch(rig, "SELECT max(version) FROM holdfast_chats.schema_version"))[0][0])


async def _fetch(rig: ClusterRig, query: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(rig.postgres.url)
    try:
        return list(await connection.fetch(query))
    finally:
        await connection.close()
