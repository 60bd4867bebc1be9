"""SDKs that people already have, unmodified, in processes of their own: each reads a
whole reply, and each reports every kind of broken one. A silent cut would be a text
without an error.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from reply_reader import numbered_words
from streaming_rig import StreamingRig, model_settings, streaming_rig
from work_rigs import until

from engines import Missing, program
from engines.fixtures import had
from proof.proxy import Proxy

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-clients" / "bin" / "python"
NODE_CLIENTS = (
    "openai-chat",
    "openai-responses",
    "ai-sdk-chat",
    "ai-sdk-responses",
    "ai-sdk-compatible",
)
PYTHON_CLIENTS = ("agents-chat", "agents-responses", "langchain-chat", "langchain-responses")
CLIENTS = (*NODE_CLIENTS, *PYTHON_CLIENTS)
WORDS = numbered_words(30)
FAULTS = ("reset", "truncate", "error")
"""How a provider breaks after its tenth token; then the reply ends with an error."""


def command(client: str) -> Sequence[str]:
    """How a client is run; skipped if what it needs is not installed."""
    if client in NODE_CLIENTS:
        if not (HERE / "node" / "node_modules").exists():
            had("npm packages", lambda: _missing("npm ci --prefix tests/clients/node"))
        return [str(had("node", _node)), str(HERE / "node" / "read.mjs"), client]
    if not PYTHON.exists():
        had("foreign Python clients", lambda: _missing("make engines"))
    return [str(PYTHON), str(HERE / "python" / "read.py"), client]


def _node() -> str:
    found = shutil.which("node")
    return found if found is not None else _missing("Node.js 18 or newer")


def _missing(what: str) -> Any:
    raise Missing(f"install it: {what}")


async def run(*arguments: str) -> Any:
    """What a client's last line says it saw."""
    process = await asyncio.create_subprocess_exec(
        *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-2000:]
    return json.loads(output.decode().strip().splitlines()[-1])


@asynccontextmanager
async def server(folder: Path) -> AsyncIterator[StreamingRig]:
    """One node with a model for each way to break."""
    settings = model_settings()
    for fault in FAULTS:
        script = {"text": "{input}", "fault": fault, "fault_after_tokens": 10}
        settings["streaming.providers"].append(
            {"name": fault, "kind": "scripted", "script": script}
        )
        settings["streaming.models"].append({"name": fault, "providers": [f"{fault}:{fault}"]})
    async with (
        asyncio.timeout(120),
        streaming_rig(folder, nodes=1, with_redis=False, settings=settings) as rig,
    ):
        yield rig


@pytest.mark.parametrize("client", CLIENTS)
async def test_client_reads_a_whole_reply(client: str, tmp_path: Path) -> None:
    async with server(tmp_path) as rig:
        url = f"{rig.nodes[0].program.url}/v1"
        seen = await run(*command(client), url, rig.key, "words", WORDS)
    assert seen == {"text": WORDS, "error": None}


@pytest.mark.parametrize("client", CLIENTS)
async def test_client_reports_each_failure_inside_a_stream(client: str, tmp_path: Path) -> None:
    """It has read some of the text: the failure comes after the status."""
    async with server(tmp_path) as rig:
        url = f"{rig.nodes[0].program.url}/v1"
        reads = [run(*command(client), url, rig.key, fault, WORDS) for fault in FAULTS]
        for fault, seen in zip(FAULTS, await asyncio.gather(*reads), strict=True):
            assert seen["error"], f"{fault}: a silent cut"
            assert WORDS.startswith(seen["text"]) and seen["text"] != WORDS


@pytest.mark.parametrize("client", CLIENTS)
async def test_client_reports_a_connection_that_breaks(client: str, tmp_path: Path) -> None:
    async with server(tmp_path) as rig, Proxy("127.0.0.1", rig.nodes[0].program.port) as link:
        url = f"http://127.0.0.1:{link.port}/v1"
        reading = asyncio.create_task(run(*command(client), url, rig.key, "slow", WORDS))
        await until(lambda: link.open > 0)
        await asyncio.sleep(0.6)  # a third of the tokens
        link.reset()
        seen = await reading
    assert seen["error"], "a silent cut"
    assert seen["text"] and WORDS.startswith(seen["text"]) and seen["text"] != WORDS


@pytest.mark.parametrize("client", CLIENTS)
async def test_client_reports_an_unknown_model(client: str, tmp_path: Path) -> None:
    async with server(tmp_path) as rig:
        url = f"{rig.nodes[0].program.url}/v1"
        seen = await run(*command(client), url, rig.key, "nothing", WORDS)
    assert seen["text"] == "" and seen["error"]


async def _events_url(rig: StreamingRig, model: str, words: str) -> str:
    """Of a new native reply, with its ticket: EventSource sends no headers."""
    session, key = rig.nodes[0].session, rig.key
    body = {"model": model, "messages": [{"role": "user", "content": words}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post("/v1/replies", json=body, headers=headers) as answer:
        return str((await answer.json())["events_url"])


@pytest.mark.parametrize("reloads", [0, 2])
async def test_event_source_resumes_and_stops_at_the_end(reloads: int, tmp_path: Path) -> None:
    """Reloaded pages continue behind their last event; after the end the browser asks
    once more, gets 204 and stops."""
    chromium = had("chromium", lambda: program("chromium", "chromium"))
    if not PYTHON.exists():
        had("foreign Python clients", lambda: _missing("make engines"))
    words = numbered_words(20)
    async with server(tmp_path) as rig:
        page, events = rig.nodes[0].program.url + "/docs", await _events_url(rig, "crawl", words)
        script = str(HERE / "python" / "eventsource.py")
        seen = await run(str(PYTHON), script, str(chromium), page, events, str(reloads))
    assert seen["text"] == words and seen["ends"] == ["done"]
    assert seen["asked"] == reloads + 2 and seen["asked_after"] == 0


async def test_event_source_gets_a_failure_as_an_event(tmp_path: Path) -> None:
    chromium = had("chromium", lambda: program("chromium", "chromium"))
    if not PYTHON.exists():
        had("foreign Python clients", lambda: _missing("make engines"))
    async with server(tmp_path) as rig:
        page, events = rig.nodes[0].program.url + "/docs", await _events_url(rig, "reset", WORDS)
        script = str(HERE / "python" / "eventsource.py")
        seen = await run(str(PYTHON), script, str(chromium), page, events, "0")
    assert seen["ends"] == ["upstream_lost"] and WORDS.startswith(seen["text"])
