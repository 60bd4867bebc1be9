"""Alerts of a real process: sinks that fail and recover, kills in between, and an end
that is reported by the next process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
from aiohttp import web
from node_forks import ForkedNode, fork_node
from program import Program
from webhook_rig import Receiver, receiving, until

from engines import free_port
from holdfast.cli.rest import RestClient
from holdfast.errors import HoldfastError

PAUSE_SECONDS = 0.1
CORRUPTION, HALTED = "HoldfastCounterCorruption", "HoldfastChatsHalted"


class AlertingProgram(Program):
    """The server judges its alerts ten times a second."""

    def __init__(self, folder: Path, *sinks: dict[str, Any], **alerts: float) -> None:
        super().__init__(folder / "state")
        self.settings: dict[str, Any] = {
            "server.state_dir": str(self.state_dir),
            "server.port": self.port,
            "alerts.sinks": sinks,
            "alerts.group_seconds": 0.1,
            **{f"alerts.{name}": value for name, value in alerts.items()},
        }
        self._log = folder / "serve.log"
        self._node: ForkedNode | None = None
        self.chat = ""

    async def start_serving(self) -> None:
        self._node = fork_node(self.settings, self._log, gauges_seconds=PAUSE_SECONDS)
        await until(lambda: asyncio.to_thread(self._ready))

    async def kill(self) -> None:
        if self._node is not None:
            await self._node.kill()
            self._node = None

    async def lose_a_counter(self) -> None:
        """As a disk that loses a write; the next send finds it."""
        await asyncio.to_thread(self._lose_a_counter)

    def _lose_a_counter(self) -> None:
        token = json.loads(self.ok("--json", "token", "--user", "ann"))["token"]
        ann = RestClient(self.url, token)
        self.chat = ann.post("/v1/chats", body={"name": "lobby", "members": []})["chat"]["chat_id"]
        drop_counters(self.state_dir / "chats.db")
        with pytest.raises(HoldfastError, match="takes no messages"):
            ann.post(f"/v1/chats/{self.chat}/messages", body={"content": "hello"}, key="k1")

    async def recover(self) -> None:
        await asyncio.to_thread(self.ok, "chat", "recover", self.chat, "--reason", "it was lost")

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def said(self, *words: str) -> str:
        return await asyncio.to_thread(self.ok, *words)

    async def listed(self) -> Any:
        """What ``holdfast alerts ls --json`` prints."""
        key = json.loads((self.state_dir / "secrets.json").read_text())["admin_key"]
        await asyncio.sleep(PAUSE_SECONDS)  # a key has a rate
        return await asyncio.to_thread(RestClient(self.url, key).get, "/admin/alerts")

    async def sink(self, name: str) -> dict[str, Any]:
        return next(each for each in (await self.listed())["sinks"] if each["name"] == name)


@asynccontextmanager
async def program(
    folder: Path, *sinks: dict[str, Any], **alerts: float
) -> AsyncIterator[AlertingProgram]:
    made = AlertingProgram(folder, *sinks, **alerts)
    try:
        yield made
    finally:
        await made.kill()


def drop_counters(file: Path) -> None:
    connection = apsw.Connection(str(file))
    connection.set_busy_timeout(10_000)  # the server probes its store meanwhile
    connection.execute("DROP TRIGGER IF EXISTS counters_are_never_deleted")
    connection.execute("DELETE FROM counters")
    connection.close()


def pager(receiver: Receiver) -> dict[str, Any]:
    return {"kind": "webhook", "name": "pager", "url": receiver.url}


def changes_of(bodies: Iterable[bytes], *names: str) -> list[str]:
    """What these notices say of some alerts, in order; the same again counts once."""
    last: dict[str, str] = {}
    found = []
    for body in bodies:
        for alert in json.loads(body)["alerts"]:
            name, status = alert["labels"]["alertname"], alert["status"]
            if name in (names or (CORRUPTION, HALTED)) and last.get(name) != status:
                found.append(f"{name} {status}")
                last[name] = status
    return found


def changes(receiver: Receiver, *names: str, after: int = 0) -> list[str]:
    return changes_of((body for _, body in receiver.calls[after:]), *names)


async def test_incident_goes_on_over_a_kill_and_its_end_is_reported(tmp_path: Path) -> None:
    async with receiving() as receiver, program(tmp_path, pager(receiver)) as node:
        await node.start_serving()
        await node.lose_a_counter()
        await until(lambda: len(changes(receiver)) == 2)
        since = (await node.listed())["alerts"][0]["since"]

        async def remembered() -> bool:
            return bool((await node.sink("pager"))["waiting"] == 0)

        await until(remembered)
        await node.kill()
        before = len(receiver.calls)
        await node.start_serving()
        status = await node.said("status")
        assert status.startswith(f"SEV-1 {CORRUPTION}: "), status
        assert f"Since {since}" in status.splitlines()[0], "it is the same incident"
        assert len(receiver.calls) == before, "which was reported already"
        await node.recover()
        await node.kill()
        await node.start_serving()
        await until(lambda: len(changes(receiver)) == 4)
        assert set(changes(receiver)[2:]) == {f"{CORRUPTION} resolved", f"{HALTED} resolved"}


async def test_sev_1_of_a_process_that_was_killed_as_it_found_it_is_reported_by_the_next(
    tmp_path: Path,
) -> None:
    """The chat was halted, and nothing else had been written."""
    async with receiving() as receiver, program(tmp_path, pager(receiver)) as node:
        await node.start_serving()
        await node.lose_a_counter()
        await node.kill()
        (node.state_dir / "alerts.json").unlink(missing_ok=True)
        before = len(receiver.calls)
        await node.start_serving()
        await until(lambda: f"{CORRUPTION} firing" in changes(receiver, after=before))


def script(folder: Path, text: str) -> str:
    """A program that keeps what it gets, one line each, and then does something."""
    file = folder / "page"
    file.write_text(f"#!/bin/sh\ncat >> {folder}/got\necho >> {folder}/got\n{text}\n")
    file.chmod(0o755)
    return str(file)


def got(folder: Path) -> list[bytes]:
    file = folder / "got"
    return [line for line in file.read_bytes().splitlines() if line] if file.exists() else []


async def test_command_that_fails_is_run_again_also_after_a_kill(tmp_path: Path) -> None:
    argv = [script(tmp_path, f"test -e {tmp_path}/works || {{ echo no >&2; exit 1; }}")]
    command = {"kind": "command", "name": "mail", "argv": argv, "severity": "SEV-1"}
    async with program(tmp_path, command) as node:
        await node.start_serving()
        await node.lose_a_counter()

        async def has_failed_twice() -> bool:
            return bool((await node.sink("mail"))["failures"] >= 2)

        await until(has_failed_twice)
        seen = await node.sink("mail")
        assert "ended with 1: no" in seen["error"] and seen["next_try"] and seen["waiting"] == 1
        assert not seen["last"], "it has taken nothing"
        assert "alerts that wait: 1" in await node.said("alerts", "ls")
        await node.kill()
        (tmp_path / "works").touch()
        tried = len(got(tmp_path))
        await node.start_serving()
        await until(lambda: len(got(tmp_path)) > tried)

        async def has_taken_it() -> bool:
            sink = await node.sink("mail")
            return bool(sink["last"] and not sink["failures"] and not sink["waiting"])

        await until(has_taken_it)
        assert changes_of(got(tmp_path), CORRUPTION) == [f"{CORRUPTION} firing"]


async def test_command_that_never_ends_is_stopped_and_run_again(tmp_path: Path) -> None:
    argv = [script(tmp_path, f"test -e {tmp_path}/works || sleep 1000")]
    command = {"kind": "command", "argv": argv, "severity": "SEV-1"}
    async with program(tmp_path, command, command_seconds=0.5) as node:
        await node.start_serving()
        await node.lose_a_counter()

        async def has_failed() -> bool:
            return "ran longer than 0.5 s" in (await node.sink("command"))["error"]

        await until(has_failed)
        (tmp_path / "works").touch()
        await until(lambda: len(got(tmp_path)) > 1)

        async def has_taken_it() -> bool:
            return not (await node.sink("command"))["waiting"]

        await until(has_taken_it)


async def test_webhook_that_fails_in_every_way_gets_what_is_so_when_it_recovers(
    tmp_path: Path,
) -> None:
    """Tried again each time; then one notice, not a queue of them, and the end after
    the beginning.
    """
    answers = [
        lambda: web.Response(status=500),
        lambda: web.Response(status=302, headers={"location": "/hook"}),
        lambda: web.Response(status=429, headers={"retry-after": "1000"}),
    ]
    async with (
        receiving() as receiver,
        program(tmp_path, pager(receiver), webhook_seconds=0.5) as node,
    ):
        receiver.answer = lambda calls: answers[calls % 3]()
        await node.start_serving()
        await node.lose_a_counter()
        await until(lambda: len(receiver.calls) >= 3)
        receiver.seconds = 1.0  # longer than it may take
        await until(lambda: "no answer within 0.5 s" in node.log)
        for said in ("it answered 500", "it answered 302 (redirects are", "it answered 429"):
            assert said in node.log
        receiver.seconds, receiver.answer = 0.0, lambda _: web.Response(status=204)
        refused = len(receiver.calls)
        await until(lambda: f"{HALTED} firing" in changes(receiver, after=refused))
        await node.recover()
        await until(lambda: f"{HALTED} resolved" in changes(receiver, after=refused))
        seen = changes(receiver, HALTED, after=refused)
        assert seen == [f"{HALTED} firing", f"{HALTED} resolved"]


async def test_end_waits_for_a_receiver_that_comes_back_after_a_kill(tmp_path: Path) -> None:
    """It fired and ended while nobody listened: it is not lost."""
    port = free_port()
    sink = {"kind": "webhook", "name": "pager", "url": f"http://127.0.0.1:{port}/hook"}
    async with program(tmp_path, sink) as node:
        await node.start_serving()
        await node.lose_a_counter()

        async def waits() -> bool:
            return bool((await node.sink("pager"))["waiting"] >= 2)

        await until(waits)
        await node.recover()

        async def has_ended() -> bool:
            return HALTED not in [each["name"] for each in (await node.listed())["alerts"]]

        await until(has_ended)
        await node.kill()
        async with receiving(port) as receiver:
            await node.start_serving()
            await until(lambda: f"{HALTED} resolved" in changes(receiver))
            (alert,) = [
                alert
                for _, body in receiver.calls[:1]
                for alert in json.loads(body)["alerts"]
                if alert["labels"]["alertname"] == HALTED
            ]
            assert alert["startsAt"] < alert["endsAt"]


async def test_command_that_cannot_be_run_stops_the_start(tmp_path: Path) -> None:
    sink = {"kind": "command", "argv": ["/no/such/page"]}
    node = AlertingProgram(tmp_path, {"kind": "log"}, sink)
    await fork_node(node.settings, tmp_path / "serve.log").ended()
    assert "alerts.sinks[1].argv: /no/such/page does not exist" in node.log
