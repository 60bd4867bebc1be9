"""The objectives of a real server under load and faults, as it measures them itself."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from long_tier import IS_LONG
from program import Program
from result_counts import tally

from engines import Server
from holdfast.access.principal import USER_SCOPES
from holdfast.access.secrets import read_secrets
from holdfast.access.tokens import Tokens, TokenSettings, shared_secret
from holdfast.cli.rest import RestClient
from holdfast.client import Client
from holdfast.clock import SystemClock
from holdfast.errors import HoldfastError
from holdfast.message import User
from proof.results import Row

SECONDS = 180.0 if IS_LONG else 4.0
PAIRS = 20 if IS_LONG else 4
SENDS_PER_SECOND = 5.0
FAULT_SECONDS = 15.0 if IS_LONG else 1.2
"""From the beginning of one fault to that of the next."""


class Load:
    """People who talk in pairs, and what they were answered."""

    def __init__(self, program: Program) -> None:
        self.url = program.url
        secrets = read_secrets(program.state_dir)
        secret = shared_secret(secrets.jwt_secret.encode())
        self._tokens = Tokens(TokenSettings(), secret, SystemClock())
        self.operator = RestClient(self.url, secrets.admin_key)
        self.sent = 0

    def token(self, user: str) -> str:
        return self._tokens.mint(User("default", user), 3600, USER_SCOPES)

    def chat(self, *users: str) -> str:
        rest = RestClient(self.url, self.token(users[0]))
        made = rest.ask("POST", "/v1/chats", {"name": "pair", "members": list(users[1:])})
        return str(made["chat"]["chat_id"])

    async def talk(self, client: Client, chat_id: str, until: float) -> None:
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(30):
                    await client.send(chat_id, "hello")
                    self.sent += 1
            except HoldfastError:
                pass  # counted by the server
            await asyncio.sleep(1 / SENDS_PER_SECOND)


async def fault(number: int, program: Program, pid: int, redis_pid: int) -> str:
    """One of three: each heals by itself."""
    match number % 3:
        case 0:
            await hold(program.state_dir / "chats.db", 0.6 if IS_LONG else 0.1)
            return "another program writes to chats.db for 0.6 s"
        case 1:
            await stop(pid, 0.5 if IS_LONG else 0.1)
            return "the server stands still for 0.5 s"
        case _:
            await stop(redis_pid, 4.0 if IS_LONG else 0.2)
            return "Redis, which counts for the limits, stands still for 4 s"


async def stop(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


async def hold(path: Path, seconds: float) -> None:
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(5_000)
    await asyncio.to_thread(connection.execute, "BEGIN IMMEDIATE")
    await asyncio.sleep(seconds)
    connection.execute("ROLLBACK")
    connection.close()


@pytest.mark.torture
@pytest.mark.covers("000 delivery lag P99 < 2 s")
@pytest.mark.covers("000 measure forced resync rate")
async def test_objectives_are_met_under_load_and_faults(
    tmp_path: Path, redis_server: Server
) -> None:
    began, program = time.monotonic(), Program(tmp_path / "state")
    counters = f"limits.counters_url={redis_server.url}"
    pid = (await asyncio.to_thread(program.serve, "--set", counters)).pid
    load = Load(program)
    try:
        until = time.monotonic() + SECONDS
        async with AsyncExitStack() as stack:
            talks = []
            for n in range(PAIRS):
                users = (f"ann{n}", f"bob{n}")
                chat_id = await asyncio.to_thread(load.chat, *users)
                for user in users:
                    client = Client(load.url, load.token(user))
                    await stack.enter_async_context(client)
                    talks.append(load.talk(client, chat_id, until))
            faults = asyncio.create_task(go_wrong(program, pid, redis_server.pid, until))
            await asyncio.gather(*talks)
            happened = await faults
        found = await asyncio.to_thread(load.operator.ask, "GET", "/admin/objectives", None)
    finally:
        program.stop()
    measured = {each["name"]: each for each in found["objectives"]}
    missed = [name for name, each in measured.items() if each["met"] is False]
    print(msgspec.json.encode(measured).decode())
    row = Row(
        "objectives under load and faults",
        f"{2 * PAIRS} clients, each {SENDS_PER_SECOND:g} sends/s for {SECONDS:g} s on a real"
        f" server, which measures itself; every {FAULT_SECONDS:g} s one of {len(happened)} faults",
        load.sent,
        len(missed),
        "every objective met; missed ones are failures",
        seconds=time.monotonic() - began,
        figures={name: shown(each) for name, each in measured.items()},
    )
    tally(row)
    assert load.sent and len(happened) == 3
    assert not IS_LONG or measured["failures_healed"]["met"], "a dependency failed and healed"


async def go_wrong(program: Program, pid: int, redis_pid: int, until: float) -> set[str]:
    """Faults in turn; the last ends before the load does."""
    happened: set[str] = set()
    for number in numbers():
        if time.monotonic() + FAULT_SECONDS > until:
            return happened
        started = time.monotonic()
        happened.add(await fault(number, program, pid, redis_pid))
        await asyncio.sleep(max(FAULT_SECONDS - (time.monotonic() - started), 0))
    raise AssertionError("unreachable")


def numbers() -> Iterator[int]:
    return itertools.count()


def shown(objective: dict[str, Any]) -> str:
    value = objective["value"]
    if value is None:
        return "nothing to measure"
    text = f"{value:.4%}" if objective["unit"] == "share" else f"{value:.4g}"
    return f"{text} (target {objective['target']})"
