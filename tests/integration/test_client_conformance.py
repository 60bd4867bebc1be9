"""The Python client passes the conformance suite: real sockets, a real state file."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from holdfast.client import ChatGone, ChatReset, Client, ClientSettings, Message, ReplyProgress
from holdfast.errors import HoldfastError
from holdfast.verify.conformance.scenarios import Scenario, verify
from holdfast.verify.conformance.subject import Timings
from holdfast.verify.conformance.suite import SCENARIOS, WITHOUT_VERIFY, name_of
from holdfast.verify.scripted_server import CHAT, ScriptedServer

TIMINGS = Timings()
FAST = ClientSettings(
    reconnect_initial_seconds=TIMINGS.reconnect_initial_ms / 1000,
    reconnect_cap_seconds=TIMINGS.reconnect_cap_ms / 1000,
    connect_timeout_seconds=TIMINGS.connect_timeout_ms / 1000,
    ack_interval_seconds=TIMINGS.ack_interval_ms / 1000,
    reply_timeout_seconds=TIMINGS.answer_timeout_ms / 1000,
    closing_timeout_seconds=TIMINGS.closing_timeout_ms / 1000,
)


class PythonSubject:
    """The product's client as the suite sees it."""

    def __init__(self, server: ScriptedServer, state: Path) -> None:
        self.received: list[tuple[int, int, str]] = []
        self.replies: list[tuple[str, str, str]] = []
        self.outcomes: dict[str, str] = {}
        self.stopped: str | None = None
        self.gone = False
        self._server = server
        self._state = state
        self._epoch = 1
        self._tokens = itertools.count(1)
        self._sends: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self.stopped = None
        self._client = Client(self._server.url, self._token, state=self._state, settings=FAST)
        await self._client.__aenter__()
        self._reader = asyncio.create_task(self._read())

    async def stop(self) -> None:
        self._reader.cancel()
        for task in self._sends:
            task.cancel()
        await self._client.__aexit__(None, None, None)

    async def restart(self, hard: bool) -> None:
        if hard:
            copy = (
                self._state.read_bytes(),
                self._state.with_name(self._state.name + "-wal").read_bytes(),
            )
            await self.stop()
            self._state.write_bytes(copy[0])
            self._state.with_name(self._state.name + "-wal").write_bytes(copy[1])
        else:
            await self.stop()
        await self.start()

    def send(self, content: str, client_message_id: str) -> None:
        task = asyncio.create_task(self._send(content, client_message_id))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(self, content: str, client_message_id: str) -> None:
        try:
            sent = await self._client.send(CHAT, content, client_message_id=client_message_id)
            self.outcomes[sent.client_message_id] = "sent"
        except HoldfastError as error:
            self.outcomes[client_message_id] = error.code
        await self._server.touch()

    async def _read(self) -> None:
        try:
            async for event in self._client.events():
                match event:
                    case Message():
                        self.received.append((self._epoch, event.sequence, event.content))
                    case ChatReset(epoch=epoch):
                        self._epoch = epoch
                        self.received.clear()
                    case ReplyProgress():
                        self.replies.append((event.reply_id, event.text, event.state))
                    case ChatGone():
                        self.gone = True
                await self._server.touch()
        except HoldfastError as error:
            self.stopped = str(error)
            await self._server.touch()

    async def _token(self) -> str:
        return f"token-{next(self._tokens)}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_of)
async def test_the_python_client_conforms(scenario: Scenario, tmp_path: Path) -> None:
    async with ScriptedServer() as server:
        subject = PythonSubject(server, tmp_path / "client.db")
        await subject.start()
        try:
            await scenario(server, subject)
            if scenario not in WITHOUT_VERIFY:
                await verify(server, subject)
            assert bool(subject.replies) == ("reply" in name_of(scenario))
        finally:
            await subject.stop()


def test_the_guide_names_every_scenario_and_no_other() -> None:
    page = ROOT / "docs/guides/client-conformance.md"
    named = re.findall(r"^\| (\w+) \|", page.read_text(), re.MULTILINE)
    assert [name for name in named if name not in ("scenario", "command", "event")] == list(
        map(name_of, SCENARIOS)
    )
    for name, value in asdict(TIMINGS).items():
        assert re.search(rf"`{name}` {value}\b", page.read_text()), (
            f"the guide does not say {name} {value}"
        )


ROOT = Path(__file__).resolve().parents[2]


def conformance(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli", "conformance", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_program_that_reads_json_lines_is_driven_and_judged() -> None:
    some = ("in_order", "token_expiry", "killed_client", "growing_reply")
    chosen = [argument for name in some for argument in ("--scenario", name)]
    driver = str(ROOT / "examples/conformance/python_client.py")
    ended = conformance("--json", *chosen, "--", sys.executable, driver)
    report = json.loads(ended.stdout)
    assert (ended.returncode, report["conforms"]) == (0, True), ended.stdout + ended.stderr
    assert [result["scenario"] for result in report["scenarios"]] == list(some)


def test_client_that_handles_replies_late_is_found_every_time() -> None:
    """It fails only where a reply and a push arrive in one piece."""
    late = str(ROOT / "tests/support/late_client.py")
    apart = conformance(
        "--scenario", "rotation", "--scenario", "duplicate_pushes", "--", sys.executable, late
    )
    assert apart.returncode == 0, apart.stdout
    together = ("resumed_then_messages", "empty_resumed_then_message", "reset_then_messages")
    chosen = [argument for name in together for argument in ("--scenario", name)]
    ended = conformance("--json", "--patience", "2", *chosen, "--", sys.executable, late)
    judged = {
        result["scenario"]: result["passed"] for result in json.loads(ended.stdout)["scenarios"]
    }
    assert ended.returncode == 1
    assert judged == {
        "resumed_then_messages": False,
        "empty_resumed_then_message": True,
        "reset_then_messages": False,
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name the program"),
        (("--", "no-such-program-anywhere"), "there is no program"),
        (("--scenario", "nonsense", "--", "true"), "there is no scenario nonsense"),
        (("--scenario", "gap", "--", "true"), "the program ended by itself"),
        (("--scenario", "gap", "--", "cat"), "which is no event"),
    ],
)
def test_program_that_cannot_be_driven_is_reported_at_once(
    arguments: tuple[str, ...], says: str
) -> None:
    ended = conformance(*arguments)
    assert ended.returncode != 0 and says in ended.stdout + ended.stderr
