"""What an operator sees when something breaks on a real node, and when it is mended.

Each time the first line of ``holdfast status`` says what is wrong and which page to
open, a sink has it, and it clears by itself. The windows of alerts pass faster;
everything else takes its own time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import httpx
import pytest
from credentials import admin_key_of
from flooder import TEXT, frame, said
from prometheus_client import Gauge
from typer.testing import CliRunner
from webhook_rig import Receiver, receiving, until
from websocket_sender import Sender

from engines import free_port
from holdfast import telemetry
from holdfast.access.principal import USER_SCOPES
from holdfast.cli.app import app
from holdfast.gateway.settings import GatewaySettings
from holdfast.message import User
from holdfast.node.lifecycle import running
from holdfast.node.node import Node
from holdfast.resilience import BreakerSettings
from holdfast.settings import ServerSettings, Settings
from holdfast.telemetry.notices import AlertSettings, SinkSettings
from holdfast.webhooks.delivery import WebhookSettings
from holdfast.webhooks.parts import WorkSettings

ROOT = Path(__file__).resolve().parents[2]
FASTER = 240
JUDGE_SECONDS = 12
"""Between two judgements, of the time that passes faster."""
GREEN = "ok: ready, and no alert fires"


class FastClock:
    """Time that passes faster; it begins now."""

    def __init__(self, faster: int) -> None:
        self._faster = faster
        self._began, self._began_at = time.monotonic(), time.time()

    def monotonic(self) -> float:
        return self._began + self._faster * (time.monotonic() - self._began)

    def now(self) -> float:
        return self._began_at + self._faster * (time.monotonic() - self._began)


class Watched:
    """A node, whoever uses it, and the pager that its alerts go to."""

    def __init__(self, node: Node, pager: Receiver) -> None:
        self.node, self._pager = node, pager

    def as_user(self, name: str = "ann") -> httpx.AsyncClient:
        token = self.node.tokens.mint(User("default", name), 3600, USER_SCOPES)
        head = {"authorization": f"Bearer {token}"}
        return httpx.AsyncClient(base_url=self.node.url, headers=head, timeout=60)

    async def chat(self, *members: str) -> str:
        async with self.as_user() as ann:
            made = await ann.post("/v1/chats", json={"name": "lobby", "members": list(members)})
        return str(made.raise_for_status().json()["chat"]["chat_id"])

    async def send(self, chat_id: str, key: str) -> int:
        async with self.as_user() as ann:
            path, head = f"/v1/chats/{chat_id}/messages", {"idempotency-key": key}
            return (await ann.post(path, json={"content": "hello"}, headers=head)).status_code

    async def run(self, *words: str) -> str:
        """What a command of an operator prints, whatever its exit code."""
        environment = {"HOLDFAST_URL": self.node.url, "HOLDFAST_TOKEN": admin_key_of(self.node)}
        done = await asyncio.to_thread(CliRunner().invoke, app, list(words), env=environment)
        lines = [line for line in done.stdout.splitlines() if not line[:4].isdigit()]  # the log's
        return "\n".join(lines)

    def reported(self, name: str, status: str) -> bool:
        return any(
            alert["labels"]["alertname"] == name and alert["status"] == status
            for _, body in self._pager.calls
            for alert in json.loads(body)["alerts"]
        )

    async def until_first(self, start: str, beside: str = "") -> list[str]:
        """Wait until the status begins so, with another line ``beside``; the page that
        it names must be there. The whole status.
        """
        lines: list[str] = []

        async def begins() -> bool:
            lines[:] = (await self.run("status")).splitlines()
            return lines[0].startswith(start) and any(x.startswith(beside) for x in lines)

        try:
            await until(begins)
        except TimeoutError:
            raise AssertionError(f"not {start}: {lines}") from None
        if page := re.search(r"Open (\S+)$", lines[0]):
            assert (ROOT / page[1]).is_file()
        assert page or lines[0] == GREEN
        return lines


@asynccontextmanager
async def watched(state: Path, faster: int = FASTER, **settings: Any) -> AsyncIterator[Watched]:
    async with receiving() as pager:
        chosen = Settings(
            ServerSettings(port=0, state_dir=str(state)),
            alerts=AlertSettings((SinkSettings("webhook", "pager", pager.url),)),
            work=WorkSettings(webhooks=WebhookSettings(private_allowed=True)),
            **settings,
        )
        pause_seconds, clock = JUDGE_SECONDS / faster, FastClock(faster)
        async with running(chosen, gauges_seconds=pause_seconds, alert_clock=clock) as node:
            yield Watched(node, pager)


@pytest.fixture(autouse=True)
def fresh_gauges() -> None:
    """Nodes of earlier tests in this process have left theirs."""
    for metric in set(telemetry.REGISTRY._names_to_collectors.values()):
        if not isinstance(metric, Gauge):
            continue
        if metric._name == "holdfast_dependency_up":
            metric.clear()  # 0 would be a failure
        for child in metric._metrics.values() if metric._labelnames else (metric,):
            child.set(0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def test_first_status_of_a_new_server_is_green(tmp_path: Path) -> None:
    async with watched(tmp_path / "state") as server:
        assert (await server.run("status")).splitlines()[0] == GREEN


async def test_full_disk_is_named_before_the_store_that_fails_by_it(small_disk: Path) -> None:
    impatient = GatewaySettings(circuit_breaker=BreakerSettings(open_duration_seconds=0.5))
    async with watched(small_disk / "state", gateway=impatient) as server:
        chat_id = await server.chat()
        filling = small_disk / "filling"
        left = os.statvfs(small_disk)
        filling.write_bytes(b"x" * (left.f_bavail * left.f_frsize))
        sends = asyncio.create_task(_keep_sending(server, chat_id))
        lines = await server.until_first(
            "SEV-2 HoldfastDiskFull: ",
            "  SEV-1 HoldfastStoreDown (dependency=store), which follows from HoldfastDiskFull: ",
        )
        assert lines[0].endswith("Open docs/guides/runbooks/disk-full.md")
        sends.cancel()
        assert "HoldfastDiskFull" in await server.run("doctor")
        await until(lambda: server.reported("HoldfastDiskFull", "firing"))
        filling.unlink()
        await server.until_first(GREEN)
        assert await server.send(chat_id, "after") == 201
        await until(lambda: server.reported("HoldfastDiskFull", "resolved"))
        await until(lambda: server.reported("HoldfastStoreDown", "resolved"))


async def _keep_sending(server: Watched, chat_id: str) -> None:
    for number in range(1_000_000):
        await server.send(chat_id, f"k{number}")


async def test_stopped_webhook_receiver_is_named_until_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    async with watched(tmp_path / "state") as server:
        first, second = await server.chat(), await server.chat()
        url = f"http://127.0.0.1:{port}/hook"
        await server.run("webhooks", "add", url, "--reason", "test")
        assert await server.send(first, "k1") == 201
        lines = await server.until_first("SEV-3 HoldfastWebhookFailing: ")
        assert lines[0].endswith("Open docs/guides/runbooks/webhook-failing.md")
        await until(lambda: server.reported("HoldfastWebhookFailing", "firing"))
        async with receiving(port):
            assert await server.send(second, "k2") == 201
            await server.until_first(GREEN)
            await until(lambda: server.reported("HoldfastWebhookFailing", "resolved"))


async def test_jobs_of_a_disabled_webhook_are_not_old(tmp_path: Path) -> None:
    """They are parked, and the status says so; a job that waits has an age at once."""
    async with watched(tmp_path / "state") as server:
        chat_id = await server.chat()
        made = await server.run(
            "--json", "webhooks", "add", f"http://127.0.0.1:{free_port()}/", "--reason", "test"
        )
        endpoint = json.loads(made)["endpoint_id"]
        await server.run("webhooks", "disable", endpoint, "--reason", "test")
        assert await server.send(chat_id, "k1") == 201

        async def waits() -> bool:
            stats = json.loads(await server.run("--json", "jobs", "stats"))
            assert stats["oldest_age_seconds"] == 0
            return sum(stats["by_state"].values()) == 1

        await until(waits)
        assert endpoint in json.loads(await server.run("--json", "status"))["webhooks"]["parked"]


async def test_dropped_counter_of_an_idle_chat_is_named_until_it_is_recovered(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path / "state") as server:
        chat_id = await server.chat()
        await server.chat()
        began = time.monotonic()
        await asyncio.to_thread(_drop_counter, tmp_path / "state" / "chats.db", chat_id)
        lines = await server.until_first("SEV-1 HoldfastCounterCorruption: ")
        assert lines[0].endswith("Open docs/guides/runbooks/counter-corruption.md")
        await until(lambda: server.reported("HoldfastCounterCorruption", "firing"))
        assert time.monotonic() - began < 60
        assert chat_id in await server.run("chat", "ls", "--halted")
        await server.run("chat", "recover", chat_id, "--reason", "it was dropped")
        assert await server.send(chat_id, "k1") == 201
        await server.until_first(GREEN)
        await until(lambda: server.reported("HoldfastCounterCorruption", "resolved"))


def _drop_counter(file: Path, chat_id: str) -> None:
    """As a disk that loses a write, or somebody's tool."""
    with contextlib.closing(apsw.Connection(str(file))) as connection:
        connection.set_busy_timeout(10_000)
        connection.execute("DROP TRIGGER counters_are_never_deleted")
        connection.execute(
            "DELETE FROM counters WHERE chat = (SELECT chat FROM chats WHERE chat_id = ?)",
            (chat_id,),
        )


FLOODERS = 60


async def test_flooded_chat_is_named_until_the_flood_ends(tmp_path: Path) -> None:
    """The queue has its default size; the disk is slow, or no client could fill it. The
    windows are longer than a commit.
    """
    names = [f"user{n}" for n in range(FLOODERS)]
    async with watched(tmp_path / "state", faster=60) as server:
        chat_id = await server.chat(*names)
        slow_down(server.node, 1.5)
        flood = asyncio.create_task(_flood(server, chat_id, names))
        lines = await server.until_first("SEV-3 HoldfastSendsTurnedAway: ")
        assert lines[0].endswith("Open docs/guides/runbooks/sends-turned-away.md")
        await until(lambda: server.reported("HoldfastSendsTurnedAway", "firing"))
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
        slow_down(server.node, 0)
        await until(lambda: server.reported("HoldfastSendsTurnedAway", "resolved"))


def slow_down(node: Node, seconds: float) -> None:
    """Let every commit take so long."""
    store: Any = node.engines.chats
    append: Callable[..., Any] = type(store).append

    async def slowly(group: Any) -> Any:
        await asyncio.sleep(seconds)
        return await append(store, group)

    store.append = slowly


async def _flood(server: Watched, chat_id: str, names: list[str]) -> None:
    """Each sends as often as a connection may: ten times a second."""
    port = server.node.settings.server.port
    async with asyncio.TaskGroup() as group:
        for name in names:
            token = server.node.tokens.mint(User("default", name), 3600, USER_SCOPES)
            sender = await Sender(port, token).connect()
            group.create_task(sender.read_to_end())
            group.create_task(_send_on(sender, chat_id, name))


async def _send_on(sender: Sender, chat_id: str, name: str) -> None:
    body = {"chat_id": chat_id, "content": "flood", "content_type": "text/plain"}
    for number in range(1_000_000):
        keys = (f"{name}-{number}-{n}" for n in range(10))
        frames = (said("send_message", client_message_id=key, **body) for key in keys)
        await sender.send(b"".join(frame(TEXT, each) for each in frames))
        await asyncio.sleep(1)
