"""The server is what its OpenAPI says: requests made up from the description, good and
bad, by schemathesis.

The application runs in this process on a loop of its own; the cases are seeded, so that
a red run is red again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from api_rig import Rest, serving
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from reply_rig import MODEL
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from holdfast.api.endpoint import Endpoint
from holdfast.api.openapi import describe, plain_path
from holdfast.api.routes import ENDPOINTS

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
SCHEMA = schemathesis.openapi.from_dict(describe(ENDPOINTS))
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
BY_PLACE = {(e.method, plain_path(e)): e for e in ENDPOINTS}


# What to put into a path that has more than the chat in it, so that a good request
# meets something that exists.
PATHS: dict[str, dict[str, Any]] = {
    e.path: {"user_id": "bob"}
    if "user_id" in e.path
    else {"sequence": 1}
    if "sequence" in e.path
    else {}
    for e in ENDPOINTS
    if "chat_id" in e.path
}


@dataclass
class Served:
    """A server on a loop in its own thread, and what is in it."""

    rest: Rest
    loop: asyncio.AbstractEventLoop
    chat: str
    keys: dict[str, str]

    def ask(self, case: Any, endpoint: Endpoint) -> httpx.Response:
        case.headers = dict(case.headers or {}) | {
            "Authorization": f"Bearer {self._bearer(case, endpoint)}"
        }
        made = requests.Request(
            **case.as_transport_kwargs(base_url="http://holdfast.test")
        ).prepare()
        return self._run(
            self.rest.client.request(
                made.method, made.url, headers=dict(made.headers), content=made.body
            )
        )

    def _bearer(self, case: Any, endpoint: Endpoint) -> str:
        if endpoint.caller == "user" and not any(
            name.lower() == "x-act-as" for name in case.headers or ()
        ):
            return self.keys["user"]
        return self.keys["operator" if endpoint.caller == "operator" else "tenant"]

    def _run(self, coroutine: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    started: list[Served] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with serving(folder=tmp_path_factory.mktemp("state")) as rest:
            chat = await rest.chat("alice", ["bob"])
            await rest.send(chat, "hello", "k1")
            keys = {"user": rest.token("alice", ttl_seconds=86400), "tenant": rest.tenant_key(),
                    "operator": rest.admin_key()}  # fmt: skip
            started.append(Served(rest, asyncio.get_running_loop(), chat, keys))
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield started[0]
    stop.set()
    thread.join(60)


OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]


def test_every_endpoint_is_tried() -> None:
    assert {(o.method.upper(), o.path) for o in OPERATIONS} == set(BY_PLACE)


@pytest.mark.parametrize("operation", OPERATIONS, ids=[o.label for o in OPERATIONS])
def test_requests_made_up_from_the_description_are_answered_as_it_says(
    operation: Any, served: Served
) -> None:
    endpoint = BY_PLACE[operation.method.upper(), operation.path]

    known = (
        {"path_parameters": {**PATHS[endpoint.path], "chat_id": served.chat}}
        if endpoint.path in PATHS
        else {}
    )
    strategies = [operation.as_strategy(GenerationMode.POSITIVE)]
    strategies += [operation.as_strategy(mode, **known) for mode in MODES]

    @seed(7)
    @settings(
        max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=st.one_of(strategies))
    def try_one(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = case.body["model"] and MODEL
        answer = served.ask(case, endpoint)
        met.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)
        assert "Expected `" not in answer.text and "Object " not in answer.text, (
            "a library's words, not ours"
        )

    met: set[int] = set()
    try_one()
    if (endpoint.method == "GET" and endpoint.caller == "user") or endpoint.raw:
        assert endpoint.status in met, "only refusals were tried"
