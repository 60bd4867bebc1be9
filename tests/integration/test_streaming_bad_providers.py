"""Providers that send nonsense, as the clients of each surface see it: one truthful end,
never a 500, never an end that is missing; and no defect of ours is counted.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_node import ScriptedNode, scripted_node
from structlog.testing import capture_logs
from upstream import DONE, Answer, Upstream, chunk, event, stream_of

from holdfast.streaming.settings import (
    ModelSettings,
    ProviderSettings,
    QueueFailoverSettings,
    StreamingSettings,
)
from holdfast.streaming.usage_store.contract import UsageQuery

TOKEN, FINISH, END = event(chunk("a")), event(chunk(finish="stop")), event(DONE)
UNREADABLE = event(b'{"created":1e400,"choices":[{"index":0,"delta":{"content":"b"}}]}')
NO_USAGE = {"prompt_tokens": -5, "completion_tokens": 10**30, "total_tokens": "many"}


@asynccontextmanager
async def node_with(state: Path, answer: Answer) -> AsyncIterator[ScriptedNode]:
    async with Upstream(answer) as server:
        settings = StreamingSettings(
            providers=(ProviderSettings("p", base_url=server.base_url),),
            models=(ModelSettings("m", ("p:m",)),),
            queue_failover=QueueFailoverSettings(max_retries=0),
        )
        async with scripted_node(state, settings) as node:
            yield node


async def ends_of(node: ScriptedNode) -> dict[str, str]:
    """How the same question ends for each kind of client, as it sees it."""
    messages = [{"role": "user", "content": "hi"}]
    chat = {"model": "m", "messages": messages}
    response = {"model": "m", "input": "hi"}
    headers = {"Authorization": f"Bearer {node.token}"}
    async with httpx.AsyncClient(base_url=node.base_url, headers=headers, timeout=20) as client:

        async def post(path: str, body: dict[str, Any]) -> httpx.Response:
            return await client.post(path, json=body)

        native = (await post("replies", chat)).json()["id"]
        answers = {
            "chat": await post("chat/completions", chat),
            "chat stream": await post("chat/completions", {**chat, "stream": True}),
            "response": await post("responses", response),
            "response stream": await post("responses", {**response, "stream": True}),
            "native": await client.get(f"replies/{native}/events"),
        }
    return {name: _end(answer) for name, answer in answers.items()}


def _end(answer: httpx.Response) -> str:
    """``done`` or the code of the failure, wherever it is."""
    if answer.headers["content-type"] != "text/event-stream":
        body = answer.json()
        error = body.get("error")
        return f"{answer.status_code} {error['code']}" if error else "done"
    last = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")][-1]
    if last == "[DONE]":
        return "done"
    failed = json.loads(last)
    return str(failed.get("error", failed).get("code", "done"))


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (stream_of(UNREADABLE, FINISH, END), "upstream_garbage"),
        (stream_of(END), "upstream_truncated"),
    ],
    ids=["number out of range", "nothing but the end"],
)
async def test_nonsense_before_the_first_token_is_502_everywhere(
    tmp_path: Path, answer: Answer, code: str
) -> None:
    with capture_logs() as lines:
        async with node_with(tmp_path, answer) as node:
            ends = await ends_of(node)
    assert ends.pop("native") == code
    assert set(ends.values()) == {f"502 {code}"}, ends
    assert not [line for line in lines if line["log_level"] == "error"]


async def test_nonsense_after_the_first_token_is_an_error_everywhere(tmp_path: Path) -> None:
    with capture_logs() as lines:
        async with node_with(tmp_path, stream_of(TOKEN, UNREADABLE, FINISH, END)) as node:
            ends = await ends_of(node)
    code = "upstream_garbage"
    assert ends == {
        "chat": f"502 {code}",
        "chat stream": code,
        "response": f"502 {code}",
        "response stream": code,
        "native": code,
    }
    assert not [line for line in lines if line["log_level"] == "error"]


async def test_usage_that_is_none_is_shown_as_it_is_counted(tmp_path: Path) -> None:
    usage = event({"choices": [], "usage": NO_USAGE})
    answer = stream_of(event(chunk("a", usage=NO_USAGE)), FINISH, usage, END)
    async with node_with(tmp_path, answer) as node:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": f"Bearer {node.token}"}
        async with httpx.AsyncClient(base_url=node.base_url, headers=headers) as client:
            whole = (await client.post("chat/completions", json=body)).json()
            asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
            stream = await client.post("chat/completions", json=asked)
        counted = await node.node.engines.usage.rows(UsageQuery("2000-01-01", "2999-01-01"))
    shown = [
        each["usage"]
        for line in stream.text.splitlines()
        if line.startswith("data: {") and "usage" in (each := json.loads(line[6:]))
    ]
    assert shown == [whole["usage"]] and whole["usage"]["estimated"] is True
    [row] = counted
    assert row.completion_tokens == 2 * whole["usage"]["completion_tokens"]
    assert row.prompt_tokens == 2 * whole["usage"]["prompt_tokens"]
