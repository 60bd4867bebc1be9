"""The Python client passes the conformance suite, over real sockets and a real state file."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path

import pytest
from conformance import SCENARIOS, WITHOUT_VERIFY, Scenario, verify
from scripted_server import CHAT, ScriptedServer

from holdfast.client import ChatGone, ChatReset, Client, ClientSettings, Message
from holdfast.errors import HoldfastError

FAST = ClientSettings(
    reconnect_initial_seconds=0.05,
    reconnect_cap_seconds=0.2,
    ack_interval_seconds=0.02,
    reply_timeout_seconds=2,
    closing_timeout_seconds=1,
)
"""Deadlines longer than a busy machine lets this process wait: the server runs in it, and does not answer meanwhile."""


class PythonSubject:
    """The product's client as the suite sees it."""

    def __init__(self, server: ScriptedServer, state: Path) -> None:
        self.received: list[tuple[int, int, str]] = []
        self.outcomes: dict[str, str] = {}
        self.stopped: str | None = None
        self.gone = False
        self._server = server
        self._state = state
        self._generation = 0
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
            copy = self._state.read_bytes(), self._state.with_name(self._state.name + "-wal").read_bytes()
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
                        self.received.append((self._generation, event.sequence, event.content))
                    case ChatReset():
                        self._generation += 1
                    case ChatGone():
                        self.gone = True
                await self._server.touch()
        except HoldfastError as error:
            self.stopped = str(error)
            await self._server.touch()

    async def _token(self) -> str:
        return f"token-{next(self._tokens)}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_python_client_conforms(scenario: Scenario, tmp_path: Path) -> None:
    async def main() -> None:
        async with ScriptedServer() as server:
            subject = PythonSubject(server, tmp_path / "client.db")
            await subject.start()
            try:
                await scenario(server, subject)
                if scenario not in WITHOUT_VERIFY:
                    await verify(server, subject)
            finally:
                await subject.stop()

    asyncio.run(main())


def test_the_guide_names_every_scenario_and_no_other() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/guides/client-conformance.md"
    named = re.findall(r"^\| (\w+) \|", page.read_text(), re.MULTILINE)
    assert named[1:] == [scenario.__name__ for scenario in SCENARIOS]
