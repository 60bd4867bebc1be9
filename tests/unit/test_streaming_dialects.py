"""Dialects: what the clients of each surface read, as a function of the entries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.streaming import sse
from holdfast.streaming.dialects import chat, native, responses
from holdfast.streaming.dialects.contract import Renderer
from holdfast.streaming.reply import (
    EntryId,
    ReplyBegin,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
    ReplyUsage,
)

BEGIN = ReplyBegin("acme", "user", "alice", "plain", "responses", "small", "node", 1_700_000_000.5)
LOST = ReplyError("worker_lost", "its node has ended", 502)


def chunk(
    delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any
) -> ReplyDelta:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish, **more}
    top = {"id": "c1", "object": "chat.completion.chunk", "created": 5, "model": "m-1"}
    return ReplyDelta(json.dumps({**top, "choices": [choice]}).encode())


def text(content: str) -> ReplyDelta:
    return chunk({"content": content})


def call(index: int, arguments: str, **more: Any) -> ReplyDelta:
    function = {"arguments": arguments, **({"name": more.pop("name")} if "name" in more else {})}
    return chunk({"tool_calls": [{"index": index, "function": function, **more}]})


def numbered(*entries: ReplyEntry) -> list[tuple[EntryId, ReplyEntry]]:
    return [(EntryId(7, n), entry) for n, entry in enumerate(entries)]


def parse(stream: bytes) -> list[tuple[str, str, Any]]:
    """(event, id, data) of each event, as the HTML standard reads a stream."""
    events, name, entry_id, data = [], "", "", []
    for line in stream.decode().split("\n"):
        field, _, value = line.partition(": ")
        if not line:
            if data:
                joined = "\n".join(data)
                events.append(
                    (name, entry_id, joined if joined == "[DONE]" else json.loads(joined))
                )
            name, entry_id, data = "", "", []
        elif field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id":
            entry_id = value
        else:
            assert line.startswith(": "), line
    assert not data, "the last event is not closed"
    return events


USAGE = ReplyUsage(3, 2, chunk=b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}')
HELLO = (BEGIN, chunk({"role": "assistant", "content": ""}), text("Hel"), text("lo"))
WHOLE = (*HELLO, chunk(finish="stop"), USAGE, ReplyDone())


def test_comment_is_one_line_with_one_newline() -> None:
    assert sse.HEARTBEAT == b": hb\n"
    assert sse.queued_comment(4, 5.2) == b": queued position=4 eta=6s\n"
    assert sse.queued_comment(4, None) == b": queued position=4\n"


def test_event_with_line_breaks_in_its_data_stays_one_event() -> None:
    assert sse.event(b'{"a":\r\n1}\n') == b'data: {"a":\ndata: 1}\n\n'


def test_chat_chunks_pass_as_the_bytes_that_came() -> None:
    odd = ReplyDelta(b'{"choices" : [ {"delta":{"x":1e400}} ], "new": "\\u00e9" }')
    rendered = chat.ChatEvents("").render(numbered(BEGIN, odd, ReplyDone()))
    assert rendered == b"data: " + odd.chunk + b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("shown", "usage", "seen"),
    [
        ("", USAGE, []),
        ('{"include_usage":true}', USAGE, [{"prompt_tokens": 3, "completion_tokens": 2}]),
        (
            '{"include_usage":true}',
            ReplyUsage(3, 2, estimated=True),
            [{"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "estimated": True}],
        ),
        ('{"include_usage":true}', ReplyUsage(3, 2), []),
    ],
    ids=["not asked for", "the provider's", "estimated", "inside a delta"],
)
def test_chat_usage_is_shown_once_if_it_was_asked_for(
    shown: str, usage: ReplyUsage, seen: list[Any]
) -> None:
    events = parse(chat.ChatEvents(shown).render(numbered(*HELLO, usage, ReplyDone())))
    assert events[-1][2] == "[DONE]"
    assert [data["usage"] for _, _, data in events[:-1] if "usage" in data] == seen


@pytest.mark.parametrize("by_log", [True, False])
def test_chat_failure_is_an_error_event_and_no_done(by_log: bool) -> None:
    events = chat.ChatEvents("")
    rendered = events.render(numbered(*HELLO, *([LOST] if by_log else [])))
    last = parse(rendered if by_log else rendered + events.fail(LOST))[-1]
    error = {"message": LOST.message, "type": "server_error", "param": None, "code": "worker_lost"}
    assert last == ("", "", {"error": error})
    assert b"[DONE]" not in rendered


def test_chat_failure_shows_the_refusal_of_the_provider_itself() -> None:
    own = b'{"error":{"message":"too long","type":"invalid_request_error","code":"context"}}'
    refused = ReplyError("upstream_refused", "refused", 400, own)
    error = parse(chat.ChatEvents("").fail(refused))[0][2]["error"]
    assert (error["message"], error["code"], error["param"]) == ("too long", "context", None)


def merged(*entries: ReplyEntry) -> Any:
    answer = chat.ChatAnswer()
    answer.add(numbered(*entries))
    return json.loads(answer.body())


def test_chat_answer_joins_text_and_keeps_usage() -> None:
    whole = merged(*WHOLE)
    assert whole["object"] == "chat.completion" and (whole["id"], whole["model"]) == ("c1", "m-1")
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert whole["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    ]
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}


def test_chat_answer_merges_tool_calls_by_their_index() -> None:
    calls = merged(
        BEGIN,
        call(0, "", id="a", type="function", name="weather"),
        call(1, "{", id="b", type="function", name="time"),
        call(0, '{"x"', id="a", type="function", name="weather"),
        call(1, "}"),
        call(0, ":1}"),
        chunk(finish="tool_calls"),
        ReplyDone(),
    )["choices"][0]["message"]["tool_calls"]
    assert calls == [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]


def test_chat_answer_keeps_unknown_fields_refusals_and_logprobs() -> None:
    choice = merged(
        BEGIN,
        chunk({"reasoning_content": "hm", "audio": {"id": "x", "data": "aa"}, "n": 1}),
        chunk({"reasoning_content": "m", "audio": {"id": "x", "data": "bb"}, "n": 2, "z": None}),
        chunk({"refusal": "I "}, logprobs={"content": [{"token": "a"}], "refusal": None}),
        chunk({"refusal": "won't"}, logprobs={"content": [{"token": "b"}]}, extra=[1]),
        chunk(finish="stop"),
    )["choices"][0]
    message = choice["message"]
    assert message["reasoning_content"] == "hmm" and message["refusal"] == "I won't"
    assert message["audio"] == {"id": "x", "data": "aabb"}
    assert (message["n"], message["z"]) == (2, None) and choice["extra"] == [1]
    assert choice["logprobs"] == {"content": [{"token": "a"}, {"token": "b"}], "refusal": None}


def response_events(*entries: ReplyEntry, after: int = -1) -> list[tuple[str, Any]]:
    rendered = responses.ResponseEvents("resp_1", after).render(numbered(*entries))
    return [(name, data) for name, _, data in parse(rendered)]


def test_response_of_text_has_its_nine_events_in_order() -> None:
    events = response_events(*WHOLE)
    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(10))
    assert all(data["type"] == name for name, data in events)
    assert events[2][1]["item"]["content"] == [] and events[3][1]["part"]["text"] == ""
    response = events[-1][1]["response"]
    assert (response["status"], response["created_at"]) == ("completed", 1_700_000_000)
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert response["usage"]["input_tokens"] == 3 and response["usage"]["total_tokens"] == 5


def test_response_of_function_calls_has_their_arguments_piece_by_piece() -> None:
    events = response_events(
        BEGIN,
        call(0, '{"x"', id="a", name="weather"),
        call(1, "{}", id="b", name="time"),
        call(0, ":1}"),
        chunk(finish="tool_calls"),
        ReplyDone(),
    )
    pieces = [
        (data["output_index"], data["delta"])
        for name, data in events
        if name == "response.function_call_arguments.delta"
    ]
    assert pieces == [(0, '{"x"'), (1, "{}"), (0, ":1}")]
    done = [data for name, data in events if name == "response.function_call_arguments.done"]
    assert [data["arguments"] for data in done] == ['{"x":1}', "{}"]
    output = events[-1][1]["response"]["output"]
    assert [(item["call_id"], item["name"], item["status"]) for item in output] == [
        ("a", "weather", "completed"),
        ("b", "time", "completed"),
    ]


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_response_that_was_cut_by_its_model_is_incomplete(finish: str, reason: str) -> None:
    name, data = response_events(*HELLO, chunk(finish=finish), ReplyDone())[-1]
    assert name == "response.incomplete" == data["type"]
    assert data["response"]["incomplete_details"] == {"reason": reason}
    assert data["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("by_log", [True, False])
def test_response_failure_is_its_event_and_an_error_without_a_name(by_log: bool) -> None:
    events = responses.ResponseEvents("resp_1")
    rendered = events.render(numbered(*HELLO, *([LOST] if by_log else [])))
    failed, error = parse(rendered if by_log else rendered + events.fail(LOST))[-2:]
    assert failed[0] == "response.failed" and failed[2]["response"]["status"] == "failed"
    assert failed[2]["response"]["output"][0]["content"][0]["text"] == "Hello"
    assert error[0] == "" and error[2]["error"]["code"] == "worker_lost"


def test_response_answer_shows_what_there_is_so_far() -> None:
    answer = responses.ResponseAnswer("resp_1")
    answer.add(numbered(*HELLO))
    running = json.loads(answer.body())
    assert running["status"] == "in_progress"
    assert running["output"][0]["content"][0]["text"] == "Hello"
    assert json.loads(answer.body("queued"))["status"] == "queued"
    answer.add([(EntryId(7, 4), ReplyError("cancelled", "by its owner", 499))])
    assert json.loads(answer.body())["status"] == "cancelled"


def test_native_events_have_their_entries_ids_and_names() -> None:
    events = native.NativeEvents()
    rendered = parse(events.queued(4, 6.0) + events.render(numbered(*WHOLE)))
    assert rendered[0] == ("queued", "", {"position": 4, "eta_seconds": 6.0})
    assert [(name, entry_id) for name, entry_id, _ in rendered[1:]] == [
        ("delta", "7-1"), ("delta", "7-2"), ("delta", "7-3"), ("delta", "7-4"),
        ("usage", "7-5"), ("done", "7-6"),
    ]  # fmt: skip
    failed = parse(events.render([(EntryId(7, 4), LOST)]))
    assert failed == [("failed", "7-4", {"code": "worker_lost", "message": LOST.message})]
    assert parse(events.fail(LOST))[0][:2] == ("failed", "")


names = st.sampled_from(["index", "delta", "message", "content", "x"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
"""What a provider may send instead of what it should."""
deltas = st.dictionaries(
    st.sampled_from(["content", "refusal", "tool_calls", "role", "x"]),
    st.text(max_size=4)
    | json_values
    | st.lists(
        st.fixed_dictionaries(
            {"index": st.integers(0, 2)},
            optional={
                "id": st.text(max_size=2),
                "function": st.dictionaries(
                    st.sampled_from(["name", "arguments"]), st.text(max_size=3)
                ),
            },
        ),
        max_size=2,
    ),
)
bodies = st.lists(
    st.builds(chunk, deltas, st.sampled_from([None, "stop", "length"]))
    | st.builds(lambda value: ReplyDelta(json.dumps({"choices": value}).encode()), json_values),
    max_size=8,
)
ends = st.sampled_from([(USAGE, ReplyDone()), (LOST,), (ReplyUsage(1, 1, True), ReplyDone()), ()])


def renderers() -> Sequence[Renderer]:
    return [
        chat.ChatEvents('{"include_usage":true}'),
        responses.ResponseEvents("resp_1"),
        native.NativeEvents(),
    ]


@given(bodies, ends, st.lists(st.integers(0, 12), max_size=4))
def test_batches_do_not_change_what_is_rendered(
    body: list[ReplyDelta], end: tuple[ReplyEntry, ...], cuts: list[int]
) -> None:
    entries = numbered(BEGIN, *body, *end)
    bounds = [0, *sorted(cuts), len(entries)]
    for at_once, in_steps in zip(renderers(), renderers(), strict=True):
        steps = [in_steps.render(entries[a:b]) for a, b in pairwise(bounds)]
        in_steps.queued(1, None)
        assert b"".join(steps) == at_once.render(entries)


@given(bodies, ends, st.integers(-1, 30))
def test_response_resumed_anywhere_shows_exactly_the_later_events(
    body: list[ReplyDelta], end: tuple[ReplyEntry, ...], after: int
) -> None:
    entries = (BEGIN, *body, *end)
    numbers = [d["sequence_number"] for _, d in response_events(*entries) if "type" in d]
    assert numbers == list(range(len(numbers)))
    later = [d["sequence_number"] for _, d in response_events(*entries, after=after) if "type" in d]
    assert later == [number for number in numbers if number > after]


@given(bodies)
def test_any_chunk_of_a_provider_makes_a_whole_answer(body: list[ReplyDelta]) -> None:
    answer, response = chat.ChatAnswer(), responses.ResponseAnswer("resp_1")
    for part in (answer, response):
        part.add(numbered(BEGIN, *body, USAGE, ReplyDone()))
        assert isinstance(json.loads(part.body()), dict)
