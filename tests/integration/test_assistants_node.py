"""Assistants on a real node: its sockets, its files, the scripted model, kill -9."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from long_tier import times
from result_counts import tally
from supervisor import QUICK, Forks, Life, Settings, Supervisor

from holdfast.access.principal import USER_SCOPES
from holdfast.client import Client, ClientEvent, Message, ReplyProgress
from holdfast.message import User
from holdfast.node.lifecycle import running
from holdfast.node.state_dir import held
from holdfast.settings import load
from holdfast.store.sqlite import SqliteStore
from holdfast.store.sqlite.database import CHATS
from holdfast.verify.history import Recorder
from proof.results import Row

KILLS = times(20)
CHATS_AT_ONCE = 4
KILLS_OF_A_PROOF = 20
SEED = 700
ANSWER = "You wrote: {input}, and that is all there is to say"


def assistants(text: str, tokens_per_second: float = 50) -> Mapping[str, Any]:
    """Settings: an assistant ``bot`` and what its model says, at which pace."""
    script = {"text": text, "tokens_per_second": tokens_per_second}
    return {
        "streaming.providers": [{"name": "trial", "kind": "scripted", "script": script}],
        "streaming.models": [{"name": "tiny", "providers": ["trial:tiny"]}],
        "streaming.assistants": [{"tenant": "default", "user": "bot", "model": "tiny"}],
    }


async def test_direct_chat_with_an_assistant_streams_text_then_one_stored_message(
    tmp_path: Path,
) -> None:
    server = {"server.port": 0, "server.state_dir": str(tmp_path / "state")}
    text = "one two three four five six seven eight nine ten"
    settings = load(None, {}, {**server, **assistants(text, 20)})
    async with asyncio.timeout(60), running(settings) as node:
        token = node.tokens.mint(User("default", "ann"), 3600, USER_SCOPES)
        async with (
            httpx.AsyncClient(
                base_url=node.url, headers={"authorization": f"Bearer {token}"}
            ) as rest,
            Client(node.url, token) as client,
        ):
            created = await rest.post("/v1/chats", json={"kind": "direct", "members": ["bot"]})
            chat_id = created.json()["chat"]["chat_id"]
            events = client.events()
            await client.connected()
            await client.send(chat_id, "hello")
            seen = await _until_message(events, "bot")
            page = (await rest.get(f"/v1/chats/{chat_id}/messages")).json()
    grown = [event for event in seen if isinstance(event, ReplyProgress)]
    texts = [event.text for event in grown]
    assert len(set(texts)) >= 4, texts
    assert all(text.startswith(each) for each in texts)
    assert texts == sorted(texts, key=len)
    assert {event.sender_id for event in grown} == {"bot"}
    stored = [m for m in page["messages"] if m["sender_id"] == "bot" and m["kind"] == "text"]
    assert [message["content"] for message in stored] == [text]
    assert {event.reply_id for event in grown} == {stored[0]["client_message_id"]}


async def _until_message(events: Any, sender: str) -> list[ClientEvent]:
    seen: list[ClientEvent] = []
    async for event in events:
        seen.append(event)
        if isinstance(event, Message) and event.sender_id == sender:
            return seen
    raise AssertionError("unreachable")


@pytest.mark.torture
@pytest.mark.long
async def test_server_killed_during_replies_stores_one_message_for_each(tmp_path: Path) -> None:
    """Half of the servers kill themselves behind a commit, such as the reply's own."""
    async with asyncio.timeout(60 + 30 * KILLS), Forks() as forks:

        async def start(settings: Settings, kill_at: str, directory: Path) -> Life:
            extra = assistants(ANSWER, 25)
            return await forks.start({**settings, **extra}, kill_at, directory)

        supervisor = Supervisor(tmp_path, Recorder(), SEED, start)
        chats = [await supervisor.prepare("ann", "bot") for _ in range(CHATS_AT_ONCE)]
        expected: Counter[tuple[str, str]] = Counter()
        got: Counter[tuple[str, str]] = Counter()
        client = Client(
            supervisor.url,
            supervisor.token("ann"),
            state=tmp_path / "ann.db",
            settings=QUICK,
        )
        await supervisor.spawn()
        assert await supervisor.serving()
        async with client:
            events = client.events()
            for number in range(KILLS):
                for chat_id in chats:
                    question = f"@bot question {number}"
                    await client.send(chat_id, question)
                    expected[chat_id, ANSWER.format(input=f"ann: {question}")] += 1
                await _kill_during_a_reply(supervisor, events, got, by_itself=bool(number % 2))
                while got.total() < expected.total():
                    await _note(events, got)
        await supervisor.stop()
        with held(supervisor.state_dir) as state:
            async with SqliteStore(state / CHATS.name) as store:
                stored: Counter[tuple[str, str]] = Counter()
                for chat_id in chats:
                    page = await store.read_after(chat_id, 0, 500, 1 << 24)
                    stored.update(
                        (chat_id, m.content)
                        for m in page.messages
                        if m.sender_id == "bot" and m.kind == "text"
                    )
        assert stored == expected, supervisor.log_path.read_text()[-4000:]
        assert got == expected
        if KILLS >= KILLS_OF_A_PROOF:
            row = Row(
                name="kill -9 during assistants' replies",
                how=f"the real server, {CHATS_AT_ONCE} replies at once, killed at any moment",
                runs=supervisor.kills,
                failures=0,
                requirement="one stored message for each reply, whole",
                figures={"replies": expected.total()},
            )
            tally(row)


async def _note(events: Any, got: Counter[tuple[str, str]]) -> ClientEvent:
    event = await anext(events)
    if isinstance(event, Message) and event.sender_id == "bot" and event.kind == "text":
        got[event.chat_id, event.content] += 1
    return event  # type: ignore[no-any-return]


async def _kill_during_a_reply(
    supervisor: Supervisor, events: Any, got: Counter[tuple[str, str]], *, by_itself: bool
) -> None:
    """Kill it while text grows; the next one may kill itself behind a commit."""
    while True:
        event = await _note(events, got)
        if isinstance(event, ReplyProgress) and event.state == "running" and event.text:
            break
    await asyncio.sleep(supervisor.rng.random() * 0.6)
    await supervisor.kill()
    if by_itself:
        await supervisor.spawn(f"commit.after:{supervisor.rng.randrange(1, 5)}")
        await supervisor.serving()
        await supervisor.dead(3)
        await supervisor.kill()
    await supervisor.spawn()
    assert await supervisor.serving()
