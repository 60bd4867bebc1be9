"""Whatever a provider sends is garbage at once, or every surface can show it.

``ProviderStream`` alone judges a chunk. What it lets through is kept, replicated and
rendered by any node, so nothing behind it may fail on it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.streaming.assistants.content import text_of
from holdfast.streaming.dialects import chat, native, responses
from holdfast.streaming.provider_stream import NESTING_MAX, ProviderStream
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
NUMBERS = [
    "0", "-1", "1.5", "1e400", "-1e400", "1E+999", "1e-400", "-0", "2e0",
    str(2**53), str(2**63), str(-(2**70)), "9" * 4_000, "9" * 4_400,
]  # fmt: skip


def nested(depth: int) -> str:
    return '{"index":0,"a":[' * (depth // 2) + "0" + "]}" * (depth // 2)


def entries_of(data: bytes) -> list[ReplyEntry]:
    """What a reply has of these events: its entries with their end."""
    stream = ProviderStream()
    entries: list[ReplyEntry] = [BEGIN]
    usage = ReplyUsage(1, 1, estimated=True)
    for chunk in stream.feed(data):
        if chunk.data:
            entries.append(ReplyDelta(chunk.data))
        usage = chunk.usage or usage
    return [*entries, usage, stream.error or ReplyDone()]


def show_everywhere(entries: list[ReplyEntry]) -> None:
    numbered = [(EntryId(7, n), entry) for n, entry in enumerate(entries)]
    for events in (
        chat.ChatEvents('{"include_usage":true}'),
        responses.ResponseEvents("resp_1"),
        native.NativeEvents(),
    ):
        for line in events.render(numbered).splitlines():
            if line.startswith(b"data: {"):
                assert isinstance(json.loads(line[6:]), dict)
    for answer in (chat.ChatAnswer(), responses.ResponseAnswer("resp_1")):
        answer.add(numbered)
        assert isinstance(json.loads(answer.body()), dict)
    for entry in entries:
        text_of(entry)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:20])
@pytest.mark.parametrize(
    "chunk",
    [
        '{"created":%s,"choices":[{"delta":{"content":"a"}}]}',
        '{"choices":[{"index":0,"delta":{"content":"a"},"x":[%s]}]}',
        '{"choices":[{"index":%s,"delta":{"content":"a"}}]}',
        '{"choices":[{"delta":{"tool_calls":[{"index":%s,"function":{"arguments":"{"}}]}}]}',
        '{"choices":[{"delta":{"content":"a"},"logprobs":{"content":[{"logprob":%s}]}}]}',
        '{"choices":[{"delta":{"content":%s}}]}',
        '{"choices":[{"delta":{}}],"usage":{"prompt_tokens":%s,"completion_tokens":1}}',
        '{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,"x":%s}}',
        '{"choices":[%s]}',
        '{"choices":%s}',
        '{"error":{"message":"no","x":%s}}',
    ],
)
def test_any_number_anywhere_is_shown_or_garbage(chunk: str, number: str) -> None:
    sent = f"data: {chunk % number}\n\n".encode()
    show_everywhere(entries_of(sent + event(choices='[{"delta":{}}]') + sent))


@pytest.mark.parametrize("number", ["1e400", "9" * 4_400])
def test_number_that_cannot_be_read_is_garbage_wherever_it_is(number: str) -> None:
    end = entries_of(event(x=number, choices='[{"delta":{}}]'))[-1]
    assert isinstance(end, ReplyError) and end.code == "upstream_garbage"


@pytest.mark.parametrize("depth", [NESTING_MAX - 10, NESTING_MAX + 1, 900, 2_000])
@pytest.mark.parametrize(
    "chunk",
    [
        '{"x":%s,"choices":[{"delta":{"content":"a"}}]}',
        '{"choices":[{"delta":{"content":"a","x":%s}}]}',
        '{"choices":[{"delta":{"content":"a"},"logprobs":{"content":[%s]}}]}',
        '{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,"x":%s}}',
        '{"error":{"message":"no","x":%s}}',
    ],
)
def test_deep_chunk_is_shown_or_garbage(chunk: str, depth: int) -> None:
    entries = entries_of(f"data: {chunk % nested(depth)}\n\n".encode())
    if depth > NESTING_MAX and "error" not in chunk:
        assert isinstance(end := entries[-1], ReplyError) and end.code == "upstream_garbage"
    far_from_the_bottom(lambda: show_everywhere(entries), frames=100)


def far_from_the_bottom(call: Callable[[], None], frames: int) -> None:
    """A reader's stack is not the producer's: what one reads, the other must too."""
    if frames:
        far_from_the_bottom(call, frames - 1)
    else:
        call()


def test_many_tool_calls_in_a_chunk_are_merged_in_linear_time() -> None:
    calls = ",".join(f'{{"index":{n}}}' for n in range(40_000))
    entries = entries_of(event(choices=f'[{{"delta":{{"tool_calls":[{calls}]}}}}]'))
    began = time.thread_time()
    show_everywhere(entries)
    assert time.thread_time() - began < 5  # 0.3 s; looking for each one took 40 s


def raw_object(fields: Mapping[str, str]) -> str:
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def event(**fields: str) -> bytes:
    return f"data: {raw_object(fields)}\n\n".encode()


raw_values = st.recursive(
    st.sampled_from([*NUMBERS, '"a"', '"\\u00e9\\n"', '""', "true", "null"]),
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda items: f"[{','.join(items)}]")
        | st.dictionaries(
            st.sampled_from(["index", "content", "function", "arguments", "id", "name", "x"]),
            inner,
            max_size=3,
        ).map(raw_object)
    ),
    max_leaves=5,
)
deltas = raw_values | raw_values.map(lambda calls: raw_object({"tool_calls": calls}))
choices = st.fixed_dictionaries(
    {"delta": deltas}, optional={"logprobs": raw_values, "finish_reason": raw_values}
).map(lambda fields: f"[{raw_object(fields)}]")
events = st.fixed_dictionaries(
    {"choices": choices | raw_values},
    optional={"usage": raw_values, "created": raw_values, "error": raw_values},
).map(lambda fields: event(**fields))


@given(st.lists(events, max_size=4))
def test_any_json_in_any_field_is_shown_or_garbage(sent: list[bytes]) -> None:
    show_everywhere(entries_of(b"".join(sent)))
