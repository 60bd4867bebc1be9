"""Alerts of a real process: sinks that fail and recover, kills in between, and an end
that is reported by the next process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
from aiohttp import web
from program import ROOT, Program
from webhook_rig import Receiver, receiving, until

from engines import free_port

CORRUPTION, HALTED = "HoldfastCounterCorruption", "HoldfastChatsHalted"


class AlertingProgram(Program):
    """The server judges its alerts five times a second."""

    def __init__(self, folder: Path, *sinks: dict[str, Any], **alerts: float) -> None:
        super().__init__(folder / "state")
        self.settings = folder / "holdfast.toml"
        lines = ["[server]", f'state_dir = "{self.state_dir}"', f"port = {self.port}", "[alerts]"]
        lines += [f"{name} = {value}" for name, value in {"group_seconds": 0.1, **alerts}.items()]
        for sink in sinks:
            lines += ["[[alerts.sinks]]", *(f"{k} = {json.dumps(v)}" for k, v in sink.items())]
        self.settings.write_text("\n".join(lines))
        self.chat = ""

    @property
    def environment(self) -> dict[str, str]:
        paths = (ROOT / "src", ROOT / "tests" / "support", ROOT / "tests")
        return {**super().environment, "PYTHONPATH": os.pathsep.join(map(str, paths))}

    def start(self, *arguments: str, **pipes: int) -> subprocess.Popen[str]:
        if arguments != ("serve",):
            return super().start(*arguments, **pipes)
        command = [sys.executable, "-m", "alerting_server", str(self.settings)]
        return subprocess.Popen(command, env=self.environment, text=True, **pipes)

    async def start_serving(self) -> subprocess.Popen[str]:
        return await asyncio.to_thread(self.serve)

    async def lose_a_counter(self) -> None:
        """As a disk that loses a write; the next send finds it."""
        create = ("chat", "create", "--user", "ann", "--name", "lobby")
        self.chat = (await asyncio.to_thread(self.ok, *create)).strip()
        await asyncio.to_thread(drop_counters, self.state_dir / "chats.db")
        sent = await asyncio.to_thread(
            self.run, "chat", "send", self.chat, "hello", "--user", "ann"
        )
        assert sent.returncode and "takes no messages" in sent.stderr, sent

    async def recover(self) -> None:
        await asyncio.to_thread(self.ok, "chat", "recover", self.chat, "--reason", "it was lost")

    @property
    def log(self) -> str:
        return (self.state_dir.parent / "serve.log").read_text()

    async def said(self, *words: str) -> str:
        await asyncio.sleep(0.1)  # a key has a rate
        return await asyncio.to_thread(self.ok, *words)

    async def sink(self, name: str) -> dict[str, Any]:
        found = json.loads(await self.said("alerts", "ls", "--json"))
        return next(each for each in found["sinks"] if each["name"] == name)


@asynccontextmanager
async def program(
    folder: Path, *sinks: dict[str, Any], **alerts: float
) -> AsyncIterator[AlertingProgram]:
    made = AlertingProgram(folder, *sinks, **alerts)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.stop)


async def kill(server: subprocess.Popen[str]) -> None:
    server.kill()
    await asyncio.to_thread(server.wait)


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
        server = await node.start_serving()
        await node.lose_a_counter()
        await until(lambda: len(changes(receiver)) == 2)
        since = json.loads(await node.said("alerts", "ls", "--json"))["alerts"][0]["since"]

        async def remembered() -> bool:
            return bool((await node.sink("pager"))["waiting"] == 0)

        await until(remembered)
        await kill(server)
        before = len(receiver.calls)
        await node.start_serving()
        status = await node.said("status")
        assert status.startswith(f"SEV-1 {CORRUPTION}: "), status
        assert f"Since {since}" in status.splitlines()[0], "it is the same incident"
        assert len(receiver.calls) == before, "which was reported already"
        await node.recover()
        await until(lambda: len(changes(receiver)) == 4)
        assert set(changes(receiver)[2:]) == {f"{CORRUPTION} resolved", f"{HALTED} resolved"}


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
        server = await node.start_serving()
        await node.lose_a_counter()

        async def has_failed_twice() -> bool:
            return bool((await node.sink("mail"))["failures"] >= 2)

        await until(has_failed_twice)
        seen = await node.sink("mail")
        assert "ended with 1: no" in seen["error"] and seen["next_try"] and seen["waiting"] == 1
        assert not seen["last"], "it has taken nothing"
        assert "alerts that wait: 1" in await node.said("alerts", "ls")
        await kill(server)
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
        server = await node.start_serving()
        await node.lose_a_counter()

        async def waits() -> bool:
            return bool((await node.sink("pager"))["waiting"] >= 2)

        await until(waits)
        await node.recover()

        async def has_ended() -> bool:
            return HALTED not in await node.said("alerts", "ls")

        await until(has_ended)
        await kill(server)
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
    async with program(tmp_path, {"kind": "log"}, sink) as node:
        ran = await asyncio.to_thread(node.run_process, "serve", "-c", str(node.settings))
        assert ran.returncode != 0
        assert "alerts.sinks[1].argv: /no/such/page does not exist" in ran.stderr
