"""The endpoints of replies: what they answer, refuse and reserve. On virtual time."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from api_rig import Rest, serving
from reply_client import Exchange, ReplyClient
from reply_rig import FakeProvider, ReplyRig
from structlog.testing import capture_logs

from holdfast.access.principal import USER_SCOPES
from holdfast.access.tickets import TICKET_SECONDS
from holdfast.api.routes import ENDPOINTS
from holdfast.errors import Unavailable
from holdfast.streaming.attached import READERS_MAX
from holdfast.streaming.pool.contract import PoolSettings
from holdfast.streaming.providers.contract import ProviderFailed
from holdfast.streaming.reply import EntryId, Owner, Payer, ReplyError
from holdfast.streaming.reply_log.contract import LogPage
from holdfast.streaming.reply_log.memory import MemoryReplyLog
from holdfast.streaming.settings import QueueFailoverSettings, StreamingSettings
from proof.virtual_loop import LoopClock

CHAT, RESPONSES, NATIVE = "/v1/chat/completions", "/v1/responses", "/v1/replies"
MESSAGES = [{"role": "user", "content": "hi"}]
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": MESSAGES},
    RESPONSES: {"model": "tiny", "input": "hi"},
    NATIVE: {"model": "tiny", "messages": MESSAGES},
}
HTML = ProviderFailed(ReplyError("upstream_garbage", "this is no stream", 502))
ONE_AT_A_TIME = StreamingSettings(pool=PoolSettings(total=1))
ALICE = Owner("acme", "user", "alice")
MIB = 1 << 20


def slow(tokens: int = 10, seconds: float = 1.0) -> FakeProvider:
    return FakeProvider(steps=["x"] * tokens, token_seconds=seconds)


def broken(error: ReplyError, *before: str) -> FakeProvider:
    return FakeProvider(steps=[*before, ProviderFailed(error, final=True)])


async def ask(rest: Rest, path: str, who: str | None = None, **changed: Any) -> httpx.Response:
    return await rest.ask("POST", path, who or rest.token("alice"), {**ASK[path], **changed})


def error(answer: httpx.Response) -> dict[str, Any]:
    """The error, in the shape of its surface."""
    body = answer.json()
    if answer.headers["content-type"] == "application/problem+json":
        assert {"type", "title", "status", "detail"} <= set(body)
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def events(stream: str | bytes) -> list[tuple[str, str, Any]]:
    """(event, id, data) of each event; comments are left out."""
    text = stream.decode() if isinstance(stream, bytes) else stream
    found = []
    for block in text.split("\n\n"):
        lines = dict(
            line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":")
        )
        if "data" in lines:
            data = lines["data"]
            decoded = data if data == "[DONE]" else json.loads(data)
            found.append((lines.get("event", ""), lines.get("id", ""), decoded))
    return found


# --- what they answer


async def test_chat_streams_chunks_and_names_its_reply() -> None:
    async with serving() as rest:
        answer = await ask(rest, CHAT, stream=True)
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["x-reply-id"].startswith("reply_")
        shown = [data for _, _, data in events(answer.content)]
        assert shown[-1] == "[DONE]"
        texts = [chunk["choices"][0]["delta"]["content"] for chunk in shown[:-1]]
        assert "".join(texts) == "Hello world"


async def test_whole_answers_wait_for_the_end_and_have_all_of_it() -> None:
    async with serving(replies=ReplyRig(provider=slow(3, 5.0))) as rest:
        chat, response = await ask(rest, CHAT), await ask(rest, RESPONSES)
        assert chat.json()["choices"][0]["message"]["content"] == "xxx"
        assert response.json()["output"][0]["content"][0]["text"] == "xxx"
        assert response.json()["status"] == "completed"


async def test_request_for_the_provider_has_the_fields_that_came() -> None:
    rig = ReplyRig()
    async with serving(replies=rig) as rest:
        await ask(rest, CHAT, top_k=7)
        await ask(rest, RESPONSES, instructions="Be brief.")
    assert rig.provider.requests[0].fields["top_k"] == b"7"
    sent = json.loads(rig.provider.requests[1].fields["messages"])
    assert [message["role"] for message in sent] == ["system", "user"]


async def test_models_are_listed_and_found_by_name() -> None:
    async with serving() as rest:
        who = rest.token("alice")
        listed = (await rest.ask("GET", "/v1/models", who)).json()
        assert [model["id"] for model in listed["data"]] == ["tiny"]
        assert (await rest.ask("GET", "/v1/models/tiny", who)).json()["object"] == "model"
        missing = await rest.ask("GET", "/v1/models/a/b", who)
        assert (missing.status_code, error(missing)["code"]) == (404, "model_not_found")


@pytest.mark.covers("002 Queue Request Handler")
async def test_queued_client_sees_its_place_as_a_comment_and_then_its_reply() -> None:
    async with serving(replies=ReplyRig(ONE_AT_A_TIME, slow(3, 2.0))) as rest:
        client = ReplyClient(rest)
        _, first = client.begin(CHAT, {**ASK[CHAT], "stream": True})
        await asyncio.sleep(0.5)
        second, done = client.begin(CHAT, {**ASK[CHAT], "stream": True})
        await asyncio.sleep(1.4)
        assert not second.sent, "headers wait two seconds for the first entry"
        await asyncio.sleep(0.7)
        assert second.status == 200 and second.body.startswith(b": queued position=1\n")
        await asyncio.gather(first, done)
        assert events(second.body)[-1][2] == "[DONE]" and second.is_whole


@pytest.mark.parametrize("path", [CHAT, RESPONSES, NATIVE])
async def test_quiet_stream_has_a_heartbeat_every_fifteen_seconds(path: str) -> None:
    async with serving(replies=ReplyRig(provider=FakeProvider(steps=["a", 40.0, "b"]))) as rest:
        if path == NATIVE:
            answer = await rest.client.get((await begun(rest))[1])
        else:
            answer = await ask(rest, path, stream=True)
        assert answer.text.count(": hb\n") == 2 and ": hb\n\n" not in answer.text
        assert answer.headers["x-accel-buffering"] == "no" and answer.headers["x-reply-id"]


# --- failures


@pytest.mark.parametrize(
    ("status", "retries"), [(502, "false"), (504, "false"), (503, None), (400, None)]
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_failure_before_the_first_token_is_a_status(
    path: str, stream: bool, status: int, retries: str | None
) -> None:
    failed = ReplyError("upstream_refused", "no", status, b'{"message":"own words"}')
    async with serving(replies=ReplyRig(provider=broken(failed))) as rest:
        answer = await ask(rest, path, stream=stream)
        assert answer.status_code == status and error(answer)["message"] == "own words"
        assert answer.headers.get("x-should-retry") == retries
        assert answer.headers["x-reply-id"]
        assert ("retry-after" in answer.headers) == (status == 503)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_failure_after_a_token_is_an_event_and_no_success(path: str) -> None:
    failed = ReplyError("upstream_lost", "the provider broke off", 502)
    async with serving(replies=ReplyRig(provider=broken(failed, "Hel"))) as rest:
        answer = await ask(rest, path, stream=True)
        assert answer.status_code == 200
        name, _, data = events(answer.content)[-1]
        assert name == "" and data["error"]["code"] == "upstream_lost"
        assert "[DONE]" not in answer.text and "response.completed" not in answer.text
        assert path == CHAT or events(answer.content)[-2][0] == "response.failed"


async def test_whole_answer_of_a_reply_that_broke_off_is_an_error() -> None:
    failed = ReplyError("upstream_truncated", "the provider ended early", 502)
    async with serving(replies=ReplyRig(provider=broken(failed, "Hel"))) as rest:
        answer = await ask(rest, CHAT)
        assert answer.status_code == 502 and error(answer)["code"] == "upstream_truncated"


async def test_wait_that_is_over_before_the_headers_is_503_and_later_an_event() -> None:
    async with serving(replies=ReplyRig(ONE_AT_A_TIME, slow(100))) as rest:
        client = ReplyClient(rest)
        streamed = {**ASK[CHAT], "stream": True}
        _, running = client.begin(CHAT, streamed)
        await asyncio.sleep(0.1)
        early, done_early = client.begin(CHAT, streamed, ("prefer", "wait=1"))
        late, done_late = client.begin(CHAT, streamed, ("prefer", "respond-async, wait=9"))
        await asyncio.gather(done_early, done_late)
        assert early.status == 503 and "retry-after" in early.headers
        assert late.status == 200
        assert events(late.body)[-1][2]["error"]["code"] == "queue_timeout"
        running.cancel()


async def test_client_that_leaves_closes_the_upstream() -> None:
    rig = ReplyRig(provider=slow(1000))
    async with serving(replies=rig) as rest:
        exchange, running = ReplyClient(rest).begin(CHAT, {**ASK[CHAT], "stream": True})
        await asyncio.sleep(5.5)
        assert not rig.provider.closed
        exchange.gone.set()
        await running
        await asyncio.sleep(6)
        assert rig.provider.closed


async def test_client_that_leaves_before_its_whole_answer_closes_the_upstream() -> None:
    rig = ReplyRig(provider=slow(1000))
    async with serving(replies=rig) as rest:
        exchange, running = ReplyClient(rest).begin(CHAT, ASK[CHAT])
        await asyncio.sleep(3)
        exchange.gone.set()
        await running
        await asyncio.sleep(6)
        assert rig.provider.closed


async def test_whole_answer_sends_nothing_before_its_end() -> None:
    async with serving(replies=ReplyRig(ONE_AT_A_TIME, slow(3, 5.0))) as rest:
        client = ReplyClient(rest)
        _, first = client.begin(CHAT, ASK[CHAT])
        await asyncio.sleep(0.1)
        waiting, second = client.begin(CHAT, ASK[CHAT])
        await asyncio.sleep(14)
        assert not waiting.sent
        await asyncio.sleep(15)
        assert not waiting.sent, "it runs, and nothing says so"
        await asyncio.gather(first, second)
        assert waiting.status == 200 and "x-reply-id" in waiting.headers


async def test_reader_has_30_s_to_make_room() -> None:
    async with serving() as rest:
        exchange, running = ReplyClient(rest).begin(CHAT, {**ASK[CHAT], "stream": True})
        await running
        assert exchange.sent[0]["unread_seconds_max"] == 30


@pytest.mark.parametrize(
    ("provider", "status", "code"),
    [
        (FakeProvider(hang=True), 504, "upstream_timeout"),
        (FakeProvider(steps=[], ends=False), 504, "upstream_timeout"),
        (FakeProvider(steps=[HTML]), 502, "upstream_garbage"),
    ],
    ids=["no headers", "no token", "HTML"],
)
async def test_provider_that_never_answers_is_502_or_504(
    provider: FakeProvider, status: int, code: str
) -> None:
    settings = StreamingSettings(queue_failover=QueueFailoverSettings(max_retries=1))
    async with serving(replies=ReplyRig(settings, provider)) as rest:
        answer = await ask(rest, CHAT)
        assert (answer.status_code, error(answer)["code"]) == (status, code)
        assert answer.headers["x-should-retry"] == "false"
        assert len(provider.opened) == 2


@pytest.mark.parametrize("path", [CHAT, RESPONSES, NATIVE])
@pytest.mark.parametrize(
    ("queue", "status", "shared"),
    [
        ({"enabled": False}, 429, False),
        ({"waiting_per_user": 1}, 429, False),
        ({"waiting_max": 1}, 503, True),
        ({"waiting_per_tenant": 1}, 503, True),
    ],
    ids=["off", "own cap", "queue full", "tenant's cap"],
)
async def test_request_that_may_not_wait_is_refused_with_its_status(
    path: str, queue: dict[str, Any], status: int, shared: bool
) -> None:
    settings = StreamingSettings(
        queue_failover=QueueFailoverSettings(**queue), pool=PoolSettings(total=1)
    )
    async with serving(replies=ReplyRig(settings, slow(1000))) as rest:
        for _ in range(1 if "enabled" in queue else 2):
            await rest.deps.streaming.start(
                ReplyRig().request(
                    reply_id=rest.deps.ids.new("reply_"),
                    owner=Owner("acme", "user", "bob" if shared else "alice"),
                    payer=Payer("acme", "bob" if shared else "alice"),
                    kind="background",
                )
            )
        answer = await ask(rest, path)
        assert answer.status_code == status and error(answer)["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert rest.deps.body_bytes.total == 0


@pytest.mark.parametrize("seconds", [7, 3600])
async def test_retry_after_is_at_most_a_minute(seconds: int) -> None:
    full = ReplyError("upstream_unavailable", "busy", 503)
    steps = [ProviderFailed(full, final=True, retry_after_seconds=float(seconds))]
    async with serving(replies=ReplyRig(provider=FakeProvider(steps=steps))) as rest:
        answer = await ask(rest, CHAT)
        assert answer.headers["retry-after"] == str(min(seconds, 60))


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_stream_that_waited_has_no_id_no_retry_no_mark_and_the_same_events(
    path: str,
) -> None:
    async with serving(replies=ReplyRig(ONE_AT_A_TIME, slow(3, 8.0))) as rest:
        client = ReplyClient(rest)
        at_once, first = client.begin(path, {**ASK[path], "stream": True})
        await asyncio.sleep(0.1)
        queued, second = client.begin(path, {**ASK[path], "stream": True})
        await asyncio.gather(first, second)
        assert b": queued position=1\n" in queued.body and queued.body.count(b": hb\n") >= 1
        lines = queued.body.decode().splitlines()
        assert not [line for line in lines if line.startswith(("id", "retry", "\ufeff"))]
        names = [
            [(name, data["sequence_number"]) if name else data for name, _, data in events(each)]
            for each in (at_once.body, queued.body)
        ]
        assert names[0] == names[1]


# --- bad requests

NOT_JSON: dict[str, bytes] = {
    "no JSON": b"<html>",
    "not UTF-8": b'{"model":"\xff"}',
    "a lone surrogate": b'{"model":"\\ud800 alone"}',
    "a depth bomb": b'{"model":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, NATIVE])
@pytest.mark.parametrize("what", NOT_JSON)
async def test_body_that_is_no_good_json_is_400(path: str, what: str) -> None:
    async with serving() as rest:
        answer = await rest.client.post(
            path,
            content=NOT_JSON[what],
            headers={
                "Authorization": f"Bearer {rest.token('alice')}",
                "Content-Type": "application/json",
            },
        )
        assert answer.status_code == 400, answer.text
        assert error(answer)["message"]


@pytest.mark.parametrize(
    ("path", "changed", "status", "param", "code"),
    [
        (CHAT, {"model": "none"}, 404, None, "model_not_found"),
        (RESPONSES, {"model": "none"}, 404, None, "model_not_found"),
        (CHAT, {"messages": []}, 400, "messages", "invalid_message"),
        (CHAT, {"messages": [MESSAGES[0], None]}, 400, "messages", "invalid_message"),
        (CHAT, {"n": 2}, 400, "n", "invalid_message"),
        (CHAT, {"max_tokens": -1}, 400, "max_tokens", "invalid_message"),
        (CHAT, {"stream": "yes"}, 400, "stream", "invalid_message"),
        (RESPONSES, {"max_output_tokens": 10**12}, 400, "max_output_tokens", "invalid_message"),
        (RESPONSES, {"tools": [{"type": "mcp"}]}, 400, "tools[0].type", "invalid_message"),
        (
            RESPONSES,
            {"previous_response_id": "resp_1"},
            400,
            "previous_response_id",
            "invalid_message",
        ),
        (RESPONSES, {"store": False, "background": True}, 400, "store", "invalid_message"),
    ],
)
async def test_bad_request_has_its_status_and_names_its_field(
    path: str, changed: dict[str, Any], status: int, param: str | None, code: str
) -> None:
    rig = ReplyRig()
    async with serving(replies=rig) as rest:
        answer = await ask(rest, path, **changed)
        assert answer.status_code == status, answer.text
        assert (error(answer)["param"], error(answer)["code"]) == (param, code)
        assert rest.deps.body_bytes.total == 0 and not rig.provider.requests


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"model": "none"}, 404),
        ({"messages": []}, 400),
        ({"messages": [None]}, 400),
        ({"n": 2}, 400),
        ({"max_completion_tokens": 0}, 400),
        ({"max_tokens": 10**12}, 400),
        ({"stream": True}, 400),
    ],
)
async def test_bad_request_for_a_native_reply_is_a_problem(
    changed: dict[str, Any], status: int
) -> None:
    rig = ReplyRig()
    async with serving(replies=rig) as rest:
        answer = await ask(rest, NATIVE, **changed)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert next(iter(changed)) in answer.json()["detail"]
        assert rest.deps.body_bytes.total == 0 and not rig.provider.requests


@pytest.mark.parametrize("prefer", ["wait=-1", "wait=x", "wait", "wait=1.5", "wait=" + "9" * 20])
async def test_malformed_prefer_is_400(prefer: str) -> None:
    async with serving() as rest:
        answer = await rest.ask("POST", CHAT, rest.token("alice"), ASK[CHAT], Prefer=prefer)
        assert (answer.status_code, error(answer)["param"]) == (400, "Prefer")


@pytest.mark.parametrize("prefer", ["waiting=x", "respond-async, WAIT = 5; x=y", 'wait="5",,'])
async def test_prefer_may_have_other_preferences_and_forms(prefer: str) -> None:
    async with serving() as rest:
        answer = await rest.ask("POST", CHAT, rest.token("alice"), ASK[CHAT], Prefer=prefer)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("wait", "seconds"), [("0", 0), ("7", 7), ("100", 30)])
async def test_prefer_wait_lowers_the_wait_and_never_raises_it(wait: str, seconds: int) -> None:
    async with serving(replies=ReplyRig(ONE_AT_A_TIME, slow(100))) as rest:
        client = ReplyClient(rest)
        _, running = client.begin(CHAT, ASK[CHAT], ("prefer", "wait=0"))
        await asyncio.sleep(0.1)
        asked, done = client.begin(CHAT, ASK[CHAT], ("prefer", f"wait={wait}"))
        began = asyncio.get_running_loop().time()
        await done
        assert asked.status == 503 and json.loads(asked.body)["error"]["code"] == "queue_timeout"
        assert asyncio.get_running_loop().time() - began == pytest.approx(seconds, abs=0.1)
        assert not running.done(), "there was room: it did not have to wait"
        running.cancel()


async def test_token_without_the_scope_of_replies_is_403_everywhere() -> None:
    async with serving() as rest:
        who = rest.token("alice", scopes=USER_SCOPES - {"replies:write"})
        for endpoint in ENDPOINTS:
            if endpoint.caller != "owner":
                continue
            path = endpoint.path.replace(":path", "").format(reply_id="r", model_id="tiny")
            answer = await rest.ask(endpoint.method, path, who, ASK.get(path))
            assert answer.status_code == 403, path
            assert "replies:write" in error(answer)["message"]


async def test_two_credentials_are_400_and_x_api_key_alone_is_one() -> None:
    async with serving() as rest:
        token = rest.token("alice")
        two = await rest.ask("POST", CHAT, token, ASK[CHAT], x_api_key=token)
        assert two.status_code == 400
        assert (await rest.ask("POST", CHAT, None, ASK[CHAT], x_api_key=token)).status_code == 200
        wrong = await rest.ask("POST", CHAT, None, ASK[CHAT], x_api_key="hf_tenant_x")
        assert (wrong.status_code, error(wrong)["code"]) == (401, "invalid_api_key")


async def test_body_beyond_its_bound_is_413_before_it_is_read() -> None:
    async with serving() as rest:
        exchange = Exchange()
        await ReplyClient(rest).ask(CHAT, exchange, ("content-length", str(4 * MIB + 1)))
        assert exchange.status == 413 and not exchange.has_begun_reading
        chunked = Exchange([b"x" * MIB] * 5)
        await ReplyClient(rest).ask(CHAT, chunked, ("transfer-encoding", "chunked"))
        assert chunked.status == 413 and rest.deps.body_bytes.total == 0


async def test_body_with_too_much_structure_is_413() -> None:
    async with serving() as rest:
        answer = await ask(rest, CHAT, messages=[0] * 100_001)
        assert answer.status_code == 413 and error(answer)["code"] == "message_too_large"


async def test_body_that_arrives_too_slowly_is_400_after_its_time() -> None:
    async with serving() as rest:
        exchange = Exchange([b"{"] * 1000, piece_seconds=1.0)
        began = asyncio.get_running_loop().time()
        await ReplyClient(rest).ask(CHAT, exchange, ("content-length", "1000"))
        assert exchange.status == 400
        assert asyncio.get_running_loop().time() - began == pytest.approx(30.0)
        assert rest.deps.body_bytes.total == 0


# --- bytes


async def test_bytes_of_a_body_count_as_they_arrive() -> None:
    async with serving(replies=ReplyRig(provider=slow(5))) as rest:
        bodies = rest.deps.body_bytes
        for size in (("content-length", "1000000"), ("transfer-encoding", "chunked")):
            exchange = Exchange([b"{" * 600, b"{" * 400, b"}"], piece_seconds=5.0)
            asking = asyncio.create_task(ReplyClient(rest).ask(CHAT, exchange, size))
            for counted in (0, 600, 1000):
                await asyncio.sleep(4)
                assert bodies.total == counted
                await asyncio.sleep(1)
            await asking
            assert bodies.total == 0


async def test_slow_bodies_that_announce_much_take_no_room_from_others() -> None:
    settings = StreamingSettings(queue_failover=QueueFailoverSettings(bytes_max=8 * MIB))
    async with serving(replies=ReplyRig(settings)) as rest:
        slow_bodies = [Exchange([b"{"] * 100, piece_seconds=1.0) for _ in range(64)]
        asking = [
            asyncio.create_task(ReplyClient(rest).ask(CHAT, each, ("content-length", str(4 * MIB))))
            for each in slow_bodies
        ]
        await asyncio.sleep(20)
        assert all(not each.sent for each in slow_bodies)
        answer = await ask(rest, CHAT, rest.token("bob"), pad="x" * MIB)
        assert answer.status_code == 200
        await asyncio.gather(*asking)
        assert {each.status for each in slow_bodies} == {400}


async def test_body_that_finds_no_room_on_its_way_is_503_and_gives_its_own_back() -> None:
    settings = StreamingSettings(queue_failover=QueueFailoverSettings(bytes_max=1000))
    async with serving(replies=ReplyRig(settings)) as rest:
        pieces = [b"{" * 400, b"{" * 400]
        first, second = Exchange(pieces, 1.0), Exchange(pieces, 1.5)
        await asyncio.gather(
            *(ReplyClient(rest).ask(CHAT, e, ("content-length", "800")) for e in (first, second))
        )
        assert (first.status, second.status) == (503, 400)
        assert rest.deps.body_bytes.total == 0


async def test_bytes_of_a_reply_are_free_at_its_first_token() -> None:
    async with serving(replies=ReplyRig(provider=slow(5))) as rest:
        exchange, running = ReplyClient(rest).begin(CHAT, {**ASK[CHAT], "stream": True})
        await asyncio.sleep(0.5)
        assert rest.deps.body_bytes.total == len(exchange.pieces[0])
        await asyncio.sleep(1)
        assert exchange.body and rest.deps.body_bytes.total == 0
        await running


async def test_bytes_of_a_body_without_a_length_are_its_own_once_it_came() -> None:
    async with serving(replies=ReplyRig(provider=slow(5))) as rest:
        body = json.dumps(ASK[CHAT]).encode()
        asking = asyncio.create_task(
            ReplyClient(rest).ask(CHAT, Exchange([body]), ("transfer-encoding", "chunked"))
        )
        await asyncio.sleep(0.5)
        assert rest.deps.body_bytes.total == len(body)
        await asking


@pytest.mark.parametrize(("bound", "status"), [("bytes_max", 503), ("bytes_per_user_max", 429)])
async def test_request_without_room_is_refused_unread(bound: str, status: int) -> None:
    settings = StreamingSettings(queue_failover=QueueFailoverSettings(**{bound: 1000}))
    async with serving(replies=ReplyRig(settings)) as rest:
        exchange = Exchange()
        await ReplyClient(rest).ask(CHAT, exchange, ("content-length", "1001"))
        assert exchange.status == status and not exchange.has_begun_reading
        assert 1 <= int(exchange.headers["retry-after"]) <= 60


# --- responses again


async def test_response_is_polled_streamed_again_cancelled_and_deleted() -> None:
    async with serving(replies=ReplyRig(provider=slow(4))) as rest:
        who = rest.token("alice")
        begun = (await ask(rest, RESPONSES, background=True)).json()
        assert begun["status"] in ("queued", "in_progress") and begun["background"]
        path = f"{RESPONSES}/{begun['id']}"
        await asyncio.sleep(2.5)
        running = (await rest.ask("GET", path, who)).json()
        assert running["status"] == "in_progress"
        assert running["output"][0]["content"][0]["text"] == "xx"
        shown = events((await rest.ask("GET", f"{path}?stream=true&starting_after=4", who)).content)
        assert [data["sequence_number"] for _, _, data in shown] == list(range(5, 12))
        whole = events((await rest.ask("GET", f"{path}?stream=true", who)).content)
        assert whole[5:] == shown and whole[-1][0] == "response.completed"
        assert (await rest.ask("POST", f"{path}/cancel", who)).json()["status"] == "completed"
        assert (await rest.ask("DELETE", path, who)).json()["deleted"] is True
        assert (await rest.ask("GET", path, who)).status_code == 404


async def test_response_is_queued_while_it_waits() -> None:
    async with serving(replies=ReplyRig(ONE_AT_A_TIME, slow(5))) as rest:
        who = rest.token("alice")
        await ask(rest, RESPONSES, background=True)
        waiting = (await ask(rest, RESPONSES, background=True)).json()
        path = f"{RESPONSES}/{waiting['id']}"
        assert waiting["status"] == "queued"
        await asyncio.sleep(4)
        assert (await rest.ask("GET", path, who)).json()["status"] == "queued"
        await asyncio.sleep(3)
        assert (await rest.ask("GET", path, who)).json()["status"] == "in_progress"


async def test_response_is_cancelled_once_and_again() -> None:
    rig = ReplyRig(provider=slow(1000))
    async with serving(replies=rig) as rest:
        who = rest.token("alice")
        begun = (await ask(rest, RESPONSES, background=True)).json()
        path = f"{RESPONSES}/{begun['id']}"
        await asyncio.sleep(2)
        for _ in range(2):
            answer = await rest.ask("POST", f"{path}/cancel", who)
            assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
            await asyncio.sleep(1)
        assert rig.provider.closed
        shown = events((await rest.ask("GET", f"{path}?stream=true", who)).content)
        assert shown[-2][0] == "response.failed" and shown[-1][2]["error"]["code"] == "cancelled"


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("?stream=true&starting_after=9", 200),
        ("?stream=true&starting_after=10", 400),
        ("?stream=true&starting_after=9999", 400),
        ("?stream=true&starting_after=-1", 400),
        ("?stream=true&starting_after=x", 400),
        ("?starting_after=1", 400),
        ("?stream=perhaps", 400),
    ],
)
async def test_starting_after_must_be_an_event_of_the_response(query: str, status: int) -> None:
    async with serving() as rest:
        made = (await ask(rest, RESPONSES)).json()
        path = f"{RESPONSES}/{made['id']}{query}"
        answer = await rest.ask("GET", path, rest.token("alice"))
        assert answer.status_code == status, answer.text
        assert answer.status_code == 400 or answer.text == ""


async def test_running_response_that_ends_before_starting_after_says_so_in_the_stream() -> None:
    async with serving(replies=ReplyRig(provider=slow(4))) as rest:
        who = rest.token("alice")
        made = (await ask(rest, RESPONSES, background=True)).json()
        path = f"{RESPONSES}/{made['id']}?stream=true&starting_after=500"
        answer = await rest.ask("GET", path, who)
        assert answer.status_code == 200
        assert [data["error"]["param"] for _, _, data in events(answer.content)] == [
            "starting_after"
        ]


async def test_response_that_is_not_stored_is_gone_after_its_end() -> None:
    async with serving() as rest:
        made = (await ask(rest, RESPONSES, store=False)).json()
        assert made["store"] is False
        answer = await rest.ask("GET", f"{RESPONSES}/{made['id']}", rest.token("alice"))
        assert answer.status_code == 404


# --- native


async def begun(rest: Rest, **changed: Any) -> tuple[str, str]:
    """A native reply's id and events_url."""
    answer = await ask(rest, NATIVE, **changed)
    assert answer.status_code == 201, answer.text
    assert answer.headers["x-reply-id"] == answer.json()["id"]
    return answer.json()["id"], answer.json()["events_url"]


async def test_native_reply_is_read_by_its_address_alone() -> None:
    async with serving() as rest:
        _, url = await begun(rest)
        answer = await rest.client.get(url)
        names = [name for name, _, _ in events(answer.content)]
        assert names == ["delta", "delta", "delta", "usage", "done"]
        assert answer.headers["content-type"] == "text/event-stream"


async def test_native_reader_goes_on_behind_its_last_event_and_stops_at_the_end() -> None:
    async with serving() as rest:
        _, url = await begun(rest)
        shown = events((await rest.client.get(url)).content)
        second, end = shown[1][1], shown[-1][1]
        by_header = await rest.client.get(url, headers={"Last-Event-ID": second})
        assert events(by_header.content) == shown[2:]
        by_query = await rest.client.get(f"{url}&last_event_id={second}")
        assert events(by_query.content) == shown[2:]
        both = await rest.client.get(f"{url}&last_event_id=x", headers={"Last-Event-ID": end})
        assert both.status_code == 204 and both.content == b""


async def test_native_reader_that_waits_sees_its_place_as_an_event_without_id() -> None:
    async with serving(replies=ReplyRig(ONE_AT_A_TIME, slow(4))) as rest:
        await begun(rest)
        _, url = await begun(rest)
        shown = events((await rest.client.get(url)).content)
        assert shown[0][:2] == ("queued", "") and shown[0][2]["position"] == 1
        assert shown[-1][0] == "done"


@pytest.mark.parametrize("written", ["x", "-1", "1", "0-1", "{epoch}-99", "1-{n}", "{epoch}-01"])
async def test_id_that_is_none_of_the_replys_events_is_400(written: str) -> None:
    async with serving() as rest:
        _, url = await begun(rest)
        epoch, _, n = events((await rest.client.get(url)).content)[-1][1].partition("-")
        wrong = written.format(epoch=epoch, n=n)
        answer = await rest.client.get(url, headers={"Last-Event-ID": wrong})
        assert answer.status_code == 400, wrong
        assert answer.headers["content-type"] == "application/problem+json"


async def test_native_reply_is_cancelled_once_and_again() -> None:
    rig = ReplyRig(provider=slow(1000))
    async with serving(replies=rig) as rest:
        reply_id, url = await begun(rest)
        reading = asyncio.create_task(rest.client.get(url))
        await asyncio.sleep(2.5)
        for _ in range(2):
            answer = await rest.ask("DELETE", f"{NATIVE}/{reply_id}", rest.token("alice"))
            assert (answer.status_code, answer.content) == (204, b"")
        shown = events((await reading).content)
        assert shown[-1][0] == "failed" and shown[-1][2]["code"] == "cancelled"
        assert rig.provider.closed


async def test_cancel_of_a_finished_native_reply_changes_nothing() -> None:
    async with serving() as rest:
        reply_id, url = await begun(rest)
        before = (await rest.client.get(url)).content
        answer = await rest.ask("DELETE", f"{NATIVE}/{reply_id}", rest.token("alice"))
        assert answer.status_code == 204
        assert (await rest.client.get(url)).content == before


# --- whose reply it is


async def test_unknown_and_expired_replies_are_404_in_their_own_shape() -> None:
    async with serving() as rest:
        response = (await ask(rest, RESPONSES)).json()["id"]
        native, url = await begun(rest)
        assert (await rest.client.get(url)).status_code == 200
        await asyncio.sleep(601)  # logs are kept ten minutes
        who = rest.token("alice")
        for one, other in ((response, native), ("resp_none", "reply_none")):
            answers = [
                await rest.ask("GET", f"{RESPONSES}/{one}", who),
                await rest.ask("GET", f"{RESPONSES}/{one}?stream=true&starting_after=1", who),
                await rest.ask("POST", f"{RESPONSES}/{one}/cancel", who),
                await rest.ask("DELETE", f"{RESPONSES}/{one}", who),
                await rest.ask("GET", f"{NATIVE}/{other}/events", who, Last_Event_ID="1-1"),
                await rest.ask("DELETE", f"{NATIVE}/{other}", who),
            ]
            assert {answer.status_code for answer in answers} == {404}
            assert all(error(answer)["message"] for answer in answers)


async def test_reader_with_a_ticket_whose_log_is_gone_gets_gap_and_not_404() -> None:
    """EventSource gives up for good at any status but 200."""
    rig = ReplyRig()
    async with serving(replies=rig) as rest:
        reply_id, url = await begun(rest)
        shown = events((await rest.client.get(url)).content)
        await rig.log.delete([reply_id])
        for last in ({}, {"Last-Event-ID": shown[1][1]}):
            answer = await rest.client.get(url, headers=last)
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/event-stream"
            assert answer.headers["x-reply-id"] == reply_id
            [(name, event_id, data)] = events(answer.content)
            assert (name, event_id, data["code"]) == ("failed", "", "gap")
        by_token = await rest.ask("GET", f"{NATIVE}/{reply_id}/events", rest.token("alice"))
        assert by_token.status_code == 404


class FailingLog(MemoryReplyLog):
    """It cannot be read before ``until``."""

    until = 0.0

    async def read(self, reply_id: str, after: EntryId | None, entries_max: int) -> LogPage | None:
        if asyncio.get_running_loop().time() < self.until:
            raise Unavailable("Redis does not answer")
        return await super().read(reply_id, after, entries_max)


async def test_reader_with_a_ticket_waits_for_a_log_that_fails_for_a_while() -> None:
    rig = ReplyRig(log=FailingLog(LoopClock()))
    async with serving(replies=rig) as rest:
        reply_id, url = await begun(rest)
        shown = events((await rest.client.get(url)).content)
        for seconds, status in ((15.0, 200), (60.0, 503)):
            FailingLog.until = asyncio.get_running_loop().time() + seconds
            by_token = await rest.ask("GET", f"{NATIVE}/{reply_id}/events", rest.token("alice"))
            answer = await rest.client.get(url)
            assert (by_token.status_code, answer.status_code) == (503, status)
            assert status == 503 or events(answer.content) == shown


async def test_reply_that_outgrew_its_log_is_whole_at_once_and_a_gap_later() -> None:
    rig = ReplyRig(provider=FakeProvider(steps=["y" * 100_000] * 12, token_seconds=0.1))
    async with serving(replies=rig) as rest:
        who = rest.token("alice")
        direct = await ask(rest, RESPONSES, stream=True)
        assert events(direct.content)[-1][0] == "response.completed"
        _, url = await begun(rest)
        first = events((await rest.client.get(url)).content)
        assert first[-1][0] == "done"
        await asyncio.sleep(31)
        again = events((await rest.client.get(url, headers={"Last-Event-ID": first[1][1]})).content)
        assert again[-1][0] == "failed" and again[-1][2]["code"] == "gap"
        assert again[:-1] == first[2 : len(again) + 1], "what there is, and nothing else"
        for had_more in (first[len(again) + 1], first[len(again) + 2], first[-1]):
            answer = await rest.client.get(url, headers={"Last-Event-ID": had_more[1]})
            assert events(answer.content) == again[-1:]
        answer = await rest.client.get(url, headers={"Last-Event-ID": again[-1][1]})
        assert answer.status_code == 204, "it has seen that end"
        path = f"{RESPONSES}/{direct.headers['x-reply-id']}?stream=true"
        shown = events((await rest.ask("GET", path, who)).content)
        assert shown[-2][0] == "response.failed" and shown[-1][2]["error"]["code"] == "gap"


async def test_reply_of_another_owner_or_surface_is_not_found() -> None:
    async with serving() as rest:
        response = (await ask(rest, RESPONSES)).json()["id"]
        native, _ = await begun(rest)
        strangers = [rest.token("bob"), rest.token("alice", "evil"), rest.tenant_key()]
        for who in strangers:
            answers = [
                await rest.ask("GET", f"{RESPONSES}/{response}", who),
                await rest.ask("GET", f"{RESPONSES}/{response}?stream=true", who),
                await rest.ask("POST", f"{RESPONSES}/{response}/cancel", who),
                await rest.ask("DELETE", f"{RESPONSES}/{response}", who),
                await rest.ask("GET", f"{NATIVE}/{native}/events", who),
                await rest.ask("DELETE", f"{NATIVE}/{native}", who),
            ]
            assert {answer.status_code for answer in answers} == {404}
        assert (
            await rest.ask("GET", f"{RESPONSES}/{native}", rest.token("alice"))
        ).status_code == 404


async def test_reply_of_a_key_is_the_keys_own() -> None:
    async with serving() as rest:
        key, other = rest.tenant_key(), rest.tenant_key()
        made = (await ask(rest, RESPONSES, who=key)).json()["id"]
        assert (await rest.ask("GET", f"{RESPONSES}/{made}", key)).status_code == 200
        assert (await rest.ask("GET", f"{RESPONSES}/{made}", other)).status_code == 404
        as_alice = await rest.ask("GET", f"{RESPONSES}/{made}", key, X_Act_As="alice")
        assert as_alice.status_code == 404


async def test_queue_counts_whom_a_key_names_and_else_the_key() -> None:
    rig = ReplyRig()
    asked: list[Any] = []
    rig.rates = lambda payer: asked.append(payer)
    async with serving(replies=rig) as rest:
        key = rest.tenant_key()
        await ask(rest, CHAT, who=key)
        await ask(rest, CHAT, who=key, user="u1")
        await ask(rest, CHAT, who=key, user="u1", safety_identifier="u2")
        await rest.ask("POST", CHAT, key, {**ASK[CHAT], "user": "u1"}, X_Act_As="alice")
    assert [(payer.user, payer.is_key) for payer in asked[1:]] == [
        ("u1", False), ("u2", False), ("alice", False)
    ]  # fmt: skip
    assert asked[0].is_key and asked[0].user.startswith("key_")


@pytest.mark.parametrize("path", [RESPONSES, NATIVE])
async def test_reader_beyond_the_bound_of_a_reply_is_429(path: str) -> None:
    async with serving(replies=ReplyRig(provider=slow(1000))) as rest:
        who = rest.token("alice")
        background = {"background": True} if path == RESPONSES else {}
        reply_id = (await ask(rest, path, **background)).json()["id"]
        found = await rest.deps.streaming.find(ALICE, reply_id)
        readers = [found.entries() for _ in range(READERS_MAX)]
        where = "?stream=true" if path == RESPONSES else "/events"
        answer = await rest.ask("GET", f"{path}/{reply_id}{where}", who)
        assert answer.status_code == 429 and "readers" in error(answer)["message"]
        assert answer.headers["retry-after"]
        for reader in readers:
            await reader.aclose()


async def test_owner_who_reads_many_responses_whole_at_once_is_429() -> None:
    async with serving() as rest:
        path = f"{RESPONSES}/{(await ask(rest, RESPONSES)).json()['id']}"
        with ExitStack() as others:
            for _ in range(READERS_MAX):
                others.enter_context(rest.deps.streaming.reading_whole(ALICE))
            for method, where in (("GET", path), ("POST", f"{path}/cancel")):
                refused = await rest.ask(method, where, rest.token("alice"))
                assert refused.status_code == 429 and refused.headers["retry-after"]
            assert (await ask(rest, RESPONSES, background=True)).is_success, "it has begun"
        assert (await rest.ask("GET", path, rest.token("alice"))).status_code == 200


async def test_ticket_reads_its_own_reply_only_and_cancels_nothing() -> None:
    async with serving(replies=ReplyRig(provider=slow(1000))) as rest:
        reply_id, url = await begun(rest)
        other_id, _ = await begun(rest)
        ticket = url.partition("?")[2]
        assert (await rest.client.get(f"{NATIVE}/{other_id}/events?{ticket}")).status_code == 404
        cancel = await rest.client.delete(f"{NATIVE}/{reply_id}?{ticket}")
        assert cancel.status_code == 401
        two = await rest.ask("GET", url, rest.token("alice"))
        assert two.status_code == 400
        assert (await rest.client.get(url + "x")).status_code == 401
        rest.clock.advance(TICKET_SECONDS)
        assert (await rest.client.get(url)).status_code == 401


@pytest.mark.parametrize("path", [CHAT, RESPONSES, NATIVE])
async def test_text_of_a_request_is_in_no_log_line(path: str) -> None:
    broke = ProviderFailed(ReplyError("upstream_lost", "reset", 502))
    rig = ReplyRig(provider=FakeProvider(steps=["SECRET answer", broke]))
    said: Any = [{"role": "user", "content": "SECRET"}]
    async with serving(replies=rig) as rest:
        with capture_logs() as lines:
            for changed in ({}, {"n": 2}, {"model": "none"}, {"stream": "SECRET"}):
                fields = {"input": said} if path == RESPONSES else {"messages": said}
                await ask(rest, path, **fields, **changed)
            await asyncio.sleep(40)
        assert lines and "SECRET" not in repr(lines)
        assert rig.provider.requests


async def test_ticket_is_in_no_log_line() -> None:
    async with serving() as rest:
        _, url = await begun(rest)
        with capture_logs() as lines:
            await rest.client.get(url)
        assert lines and url.partition("ticket=")[2] not in repr(lines)


async def test_replies_of_a_revoked_owner_are_cancelled_and_their_tickets_void() -> None:
    rig = ReplyRig(provider=slow(1000))
    async with serving(replies=rig) as rest:
        _, url = await begun(rest)
        reading = asyncio.create_task(rest.client.get(url))
        await asyncio.sleep(1.5)
        rest.clock.advance(1)
        revoked = {"kind": "user", "tenant": "acme", "user_id": "alice", "reason": "left"}
        await rest.ask("POST", "/admin/revocations", rest.admin_key(), revoked)
        async with asyncio.timeout(5):
            shown = events((await reading).content)
        assert shown[-1][2]["code"] == "cancelled" and rig.provider.closed
        assert (await rest.client.get(url)).status_code == 401


async def test_replies_of_a_revoked_key_are_cancelled_and_their_tickets_void() -> None:
    rig = ReplyRig(provider=slow(1000))
    async with serving(replies=rig) as rest:
        key = rest.tenant_key()
        url = (await ask(rest, NATIVE, who=key)).json()["events_url"]
        reading = asyncio.create_task(rest.client.get(url))
        await asyncio.sleep(1.5)
        await rest.deps.keys.revoke(rest.deps.keys.find(key).key_id)
        async with asyncio.timeout(5):
            shown = events((await reading).content)
        assert shown[-1][2]["code"] == "cancelled" and rig.provider.closed
        assert (await rest.client.get(url)).status_code == 401


async def test_page_of_a_listed_origin_may_ask_and_read_what_it_needs() -> None:
    origin = "https://app.example"
    async with serving(origins=frozenset({origin})) as rest:
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x-api-key,last-event-id,prefer,content-type",
        }
        assert (await rest.client.options(CHAT, headers=asked)).status_code == 200
        answer = await rest.ask("POST", CHAT, rest.token("alice"), ASK[CHAT], Origin=origin)
        assert "X-Reply-Id" in answer.headers["access-control-expose-headers"]


# --- Idempotency-Key


async def test_same_key_and_body_attach_and_another_body_is_409() -> None:
    rig = ReplyRig(provider=slow(3))
    async with serving(replies=rig) as rest:
        who = rest.token("alice")

        async def keyed(**changed: Any) -> httpx.Response:
            body = {**ASK[CHAT], "stream": True, **changed}
            return await rest.ask("POST", CHAT, who, body, Idempotency_Key="k1")

        first, second = await asyncio.gather(keyed(), keyed())
        third, other = await keyed(), await keyed(temperature=1)
        assert first.content == second.content == third.content
        assert len(rig.provider.requests) == 1
        assert other.status_code == 409 and error(other)["code"] == "idempotency_key_reused"
        assert other.headers["x-should-retry"] == "false"
        plain = {name: value for name, value in ASK[CHAT].items() if name != "stream"}
        here = await rest.ask("POST", CHAT, who, plain, Idempotency_Key="k2")
        there = await rest.ask("POST", NATIVE, who, plain, Idempotency_Key="k2")
        assert (here.status_code, there.status_code) == (200, 409)
        assert (await ask(rest, CHAT, who=rest.token("bob"))).status_code == 200
    assert rest.deps.body_bytes.total == 0


@pytest.mark.parametrize(("path", "changed"), [(NATIVE, {}), (RESPONSES, {"background": True})])
async def test_same_key_gives_the_same_reply_where_it_is_read_later(
    path: str, changed: dict[str, Any]
) -> None:
    rig = ReplyRig(provider=slow(3))
    async with serving(replies=rig) as rest:

        async def keyed(**other: Any) -> httpx.Response:
            body = {**ASK[path], **changed, **other}
            return await rest.ask("POST", path, rest.token("alice"), body, Idempotency_Key="k1")

        answers = [await keyed(), await keyed()]
        await asyncio.sleep(5)
        answers.append(await keyed())
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert len(rig.provider.requests) == 1
        other = await keyed(temperature=1)
        assert other.status_code == 409 and error(other)["message"]
        assert other.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, NATIVE])
@pytest.mark.parametrize("key", ["k" * 1000, "a b\tc"])
async def test_malformed_key_is_400_in_the_shape_of_the_surface(path: str, key: str) -> None:
    async with serving() as rest:
        who = rest.token("alice")
        answer = await rest.ask("POST", path, who, ASK[path], Idempotency_Key=key)
        assert answer.status_code == 400 and "Idempotency-Key" in error(answer)["message"]
        assert rest.deps.body_bytes.total == 0


async def test_deleted_response_is_cancelled_and_gone_at_once() -> None:
    rig = ReplyRig(provider=slow(1000))
    async with serving(replies=rig) as rest:
        who = rest.token("alice")
        path = f"{RESPONSES}/{(await ask(rest, RESPONSES, background=True)).json()['id']}"
        await asyncio.sleep(2.5)
        assert (await rest.ask("DELETE", path, who)).json()["deleted"] is True
        assert rig.provider.closed
        for method in ("GET", "DELETE"):
            assert (await rest.ask(method, path, who)).status_code == 404
