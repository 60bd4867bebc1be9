"""Records the series that alerts read, from a real node under load and faults.

    python tests/support/record_series.py

writes tests/golden/recorded_series.json, on which a test compares the judge in the
process with Prometheus' rules. Run it again when an alert reads a series that the
recording does not have; that test says so.

The node serves on loopback, with its state on a small tmpfs (so it needs the right to
mount), and is scraped over HTTP every quarter of a second. In the recording two scrapes
are 15 s apart, as in Prometheus, so that half an hour of an operator's time passes in
half a minute. A second process continues where the first was killed: counters begin
again at 0, and some scrapes are missing.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(ROOT / "docs")]

import apsw  # noqa: E402
import httpx  # noqa: E402
from aiohttp import web  # noqa: E402
from credentials import admin_key_of  # noqa: E402
from rule_cases import Segment  # noqa: E402
from scripted_node import STREAMING  # noqa: E402
from webhook_rig import Receiver, receiving  # noqa: E402

from engines import free_port  # noqa: E402
from holdfast.access.principal import USER_SCOPES  # noqa: E402
from holdfast.client import Client  # noqa: E402
from holdfast.errors import Unavailable  # noqa: E402
from holdfast.ingest.send_queue import IntakeSettings  # noqa: E402
from holdfast.message import User  # noqa: E402
from holdfast.node.lifecycle import running  # noqa: E402
from holdfast.node.node import Node  # noqa: E402
from holdfast.settings import DurabilitySettings, ServerSettings, Settings  # noqa: E402
from holdfast.telemetry.alerts import ALERTS  # noqa: E402
from holdfast.telemetry.judge import Judge  # noqa: E402
from holdfast.telemetry.notices import AlertSettings, SinkSettings  # noqa: E402
from holdfast.webhooks.delivery import WebhookSettings  # noqa: E402
from holdfast.webhooks.parts import WorkSettings  # noqa: E402

RECORDING = ROOT / "tests/golden/recorded_series.json"
SCRAPE_SECONDS = 0.25
USERS = 10
DISK_BYTES = 64_000_000
MISSED_SCRAPES = 3
SAMPLE = re.compile(r"holdfast_(\w+)(?:\{(.*)\})? (\S+)")


@dataclass
class Recorder:
    """``series``: the values of each series, by scrape; NaN: it was not there."""

    series: dict[str, list[float]] = field(default_factory=dict)
    scrapes: int = 0

    def take(self, text: str) -> None:
        names = Judge(ALERTS).names
        for match in filter(None, map(SAMPLE.match, text.splitlines())):
            if match[1] in names:
                key = f"{match[1]}{{{match[2] or ''}}}"
                values = self.series.setdefault(key, [])
                values += [math.nan] * (self.scrapes - len(values)) + [float(match[3])]
        self.scrapes += 1

    def miss(self, scrapes: int) -> None:
        self.scrapes += scrapes

    async def run(self, node: Node) -> None:
        head = {"authorization": f"Bearer {admin_key_of(node)}"}
        async with httpx.AsyncClient(base_url=node.url, headers=head, timeout=30) as server:
            while True:
                self.take((await server.get("/metrics")).raise_for_status().text)
                await asyncio.sleep(SCRAPE_SECONDS)


@dataclass
class Load:
    """People who send all the time. ``key``: of each send; a constant one repeats it."""

    node: Node
    chat_id: str = ""
    busy_chat_id: str = ""
    at_once: int = 1
    pause_seconds: float = 0.1
    repeats: bool = False

    def person(self, name: str) -> httpx.AsyncClient:
        token = self.node.tokens.mint(User("default", name), 3600, USER_SCOPES)
        head = {"authorization": f"Bearer {token}"}
        return httpx.AsyncClient(base_url=self.node.url, headers=head, timeout=30)

    async def make_chats(self) -> None:
        async with self.person("u0") as first:
            members = [f"u{n}" for n in range(1, USERS)]
            for name in ("chat_id", "busy_chat_id"):
                made = await first.post("/v1/chats", json={"name": name, "members": members})
                setattr(self, name, made.raise_for_status().json()["chat"]["chat_id"])

    async def send(self, name: str) -> None:
        number = 0
        async with self.person(name) as person:
            while True:
                number += 1
                key = "same" if self.repeats and number % 2 else f"{os.getpid()}-{number}"
                await asyncio.gather(
                    *(self._one(person, f"{name}-{key}-{n}") for n in range(self.at_once)),
                    return_exceptions=True,
                )
                await asyncio.sleep(self.pause_seconds)

    async def _one(self, person: httpx.AsyncClient, key: str) -> None:
        chat_id = self.busy_chat_id if self.at_once > 1 else self.chat_id
        path, head = f"/v1/chats/{chat_id}/messages", {"idempotency-key": key}
        content = "the same" if "-same-" in key else key
        await person.post(path, json={"content": content}, headers=head)

    async def ask_for_replies(self) -> None:
        async with self.person("u1") as person:
            for model in ("error", "refuse") * 40:
                body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
                with suppress(httpx.HTTPError):
                    await person.post("/v1/chat/completions", json=body)
                await asyncio.sleep(0.1)


Append = Callable[..., Awaitable[Any]]


@asynccontextmanager
async def store_with(node: Node, change: Callable[[Append], Append]) -> AsyncIterator[None]:
    """The node's own store, whose writes are changed while the block runs."""
    store: Any = node.engines.chats
    verbs = {name: getattr(store, name) for name in ("append", "touch")}
    for name, verb in verbs.items():
        setattr(store, name, change(verb))
    try:
        yield
    finally:
        for name, verb in verbs.items():
            setattr(store, name, verb)


def slowly(verb: Append) -> Append:
    async def slow(*arguments: Any) -> Any:
        await asyncio.sleep(0.7)
        return await verb(*arguments)

    return slow


def never(verb: Append) -> Append:
    async def fail(*arguments: Any) -> Any:
        raise Unavailable("the disk is gone")

    return fail


async def fill_disk(state: Path, left: float, seconds: float) -> None:
    """Leave this share of the disk free for a while."""
    found = os.statvfs(state)
    size = int(found.f_frsize * (found.f_bavail - left * found.f_blocks))
    filling = state / "filling"
    filling.write_bytes(b"x" * size)
    await asyncio.sleep(seconds)
    filling.unlink()


async def drop_counter(node: Node, load: Load) -> None:
    connection = apsw.Connection(str(node.settings.server.state_path / "chats.db"))
    connection.setbusytimeout(10_000)
    connection.execute("DROP TRIGGER IF EXISTS counters_are_never_deleted")
    connection.execute(
        "DELETE FROM counters WHERE chat = (SELECT chat FROM chats WHERE chat_id = ?)",
        (load.busy_chat_id,),
    )
    connection.close()
    await asyncio.sleep(4)
    head = {"authorization": f"Bearer {admin_key_of(node)}"}
    async with httpx.AsyncClient(base_url=node.url, headers=head) as operator:
        path = f"/admin/chats/{load.busy_chat_id}/recover"
        (await operator.post(path, json={"reason": "recorded"})).raise_for_status()


async def faults(node: Node, load: Load, receiver: Receiver) -> None:
    """One after another; each as long as its alert needs at 60 times the speed."""
    await asyncio.sleep(3)
    receiver.answer = lambda _: web.Response(status=500)
    load.repeats = True
    await asyncio.sleep(11)
    load.repeats = False
    replies = asyncio.create_task(load.ask_for_replies())
    async with store_with(node, slowly):
        await asyncio.sleep(11)
        load.at_once = 20
        await asyncio.sleep(4)
        load.at_once = 1
    await drop_counter(node, load)
    async with store_with(node, never):
        await asyncio.sleep(9)
    await fill_disk(node.settings.server.state_path, 0.03, 3)
    await fill_disk(node.settings.server.state_path, 0.08, 3)
    await replies
    receiver.answer = lambda _: web.Response(status=204)
    await asyncio.sleep(12)


def settings(state: Path) -> Settings:
    sink = SinkSettings("webhook", "pager", f"http://127.0.0.1:{free_port()}/")
    return Settings(
        ServerSettings(port=0, state_dir=str(state)),
        alerts=AlertSettings((sink,), group_seconds=1.0),
        durability=DurabilitySettings(
            intake=IntakeSettings(max_waiting_per_chat=40, hot_messages_per_minute=20)
        ),
        work=WorkSettings(webhooks=WebhookSettings(private_allowed=True)),
        streaming=replace(STREAMING),
    )


async def record(state: Path, *, with_faults: bool) -> Recorder:
    """One life of a node."""
    recorder = Recorder()
    async with (
        receiving() as receiver,
        running(settings(state), gauges_seconds=SCRAPE_SECONDS) as node,
    ):
        load = Load(node)
        await load.make_chats()
        head = {"authorization": f"Bearer {admin_key_of(node)}"}
        async with httpx.AsyncClient(base_url=node.url, headers=head) as operator:
            body = {"url": receiver.url, "tenant": "default", "reason": "recorded"}
            (await operator.post("/admin/webhooks", json=body)).raise_for_status()
        tokens = [node.tokens.mint(User("default", f"u{n}"), 3600, USER_SCOPES) for n in (8, 9)]
        tasks = [asyncio.create_task(load.send(f"u{n}")) for n in range(USERS - 2)]
        async with Client(node.url, tokens[0]), Client(node.url, tokens[1]):
            tasks.append(asyncio.create_task(recorder.run(node)))
            await (faults(node, load, receiver) if with_faults else asyncio.sleep(6))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return recorder


def segments(values: list[float]) -> list[Segment]:
    """Equal steps in a row as one segment."""
    found: list[Segment] = []
    for value in values:
        if found and math.isnan(value) and math.isnan(found[-1].start):
            found[-1] = found[-1]._replace(count=found[-1].count + 1)
        elif found and not math.isnan(value) and not math.isnan(found[-1].start):
            start, step, count = found[-1]
            if count == 1:
                step = round(value - start, 9)
            if math.isclose(start + step * count, value, rel_tol=1e-12, abs_tol=1e-9):
                found[-1] = Segment(start, step, count + 1)
                continue
            found.append(Segment(value, 0.0, 1))
        else:
            found.append(Segment(value, 0.0, 1))
    return found


def main() -> None:
    if len(sys.argv) > 1:
        state, part = Path(sys.argv[1]), sys.argv[2]
        recorder = asyncio.run(record(state, with_faults=part == "first"))
        values = {key: [None if math.isnan(v) else v for v in each] for key, each in
                  recorder.series.items()}  # fmt: skip
        print(json.dumps([recorder.scrapes, values]))
        return
    whole = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder]
        subprocess.run(mount, check=True)
        try:
            for part in ("first", "second"):
                state = Path(folder) / "state"
                done = subprocess.run(
                    [sys.executable, __file__, str(state), part], stdout=subprocess.PIPE, check=True
                )
                scrapes, series = json.loads(done.stdout.splitlines()[-1])
                for key, values in series.items():
                    own = whole.series.setdefault(key, [])
                    own += [math.nan] * (whole.scrapes - len(own))
                    own += [math.nan if each is None else each for each in values]
                whole.scrapes += scrapes
                whole.miss(MISSED_SCRAPES)
        finally:
            subprocess.run(["umount", folder], check=True)
    lines = [
        f"{json.dumps(key)}: {json.dumps(segments(values))}"
        for key, values in sorted(whole.series.items())
    ]
    RECORDING.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(whole.series)} series of {whole.scrapes} scrapes: {RECORDING}")


if __name__ == "__main__":
    main()
