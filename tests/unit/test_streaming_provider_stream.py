"""The reader of providers' streams: what counts in an event, and that the place where
the bytes are cut does not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.streaming.provider_stream import (
    BARE_BYTES_MAX,
    EVENT_BYTES_MAX,
    ProviderStream,
    error_object,
)
from holdfast.streaming.providers.contract import ProviderChunk
from holdfast.streaming.reply import ReplyError, ReplyUsage

ALIVE = ProviderChunk(b"")
HELLO = b'{"id":"c1","choices":[{"index":0,"delta":{"content":"hello"},"x":1}],"new":[1]}'
ROLE = b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
FINISH = b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
USAGE = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}'


def content(data: bytes) -> ProviderChunk:
    """The chunk of this event, which has text."""
    [choice] = [c for c in json.loads(data)["choices"] if c.get("index", 0) == 0]
    said = [value for name, value in choice["delta"].items() if name != "role"]
    text = "".join(value for value in said if isinstance(value, str))
    return ProviderChunk(data, content=True, text_bytes=len(text.encode()))


def sse(*events: bytes) -> bytes:
    return b"".join(b"data: %s\n\n" % event for event in events)


def read(*pieces: bytes) -> tuple[list[ProviderChunk], ProviderStream]:
    stream = ProviderStream()
    chunks = [chunk for piece in pieces for chunk in stream.feed(piece)]
    return chunks, stream


def failure_of(data: bytes) -> ReplyError:
    _, stream = read(data)
    assert stream.error is not None
    return stream.error


def test_chunk_passes_on_as_it_came_with_what_counts_in_it() -> None:
    chunks, stream = read(sse(ROLE, HELLO, FINISH, USAGE, b"[DONE]"))
    assert chunks[:3] == [
        ProviderChunk(ROLE),
        content(HELLO),
        ProviderChunk(FINISH, finish=True),
    ]
    assert chunks[3] == ProviderChunk(b"", usage=ReplyUsage(3, 5, chunk=USAGE))
    assert stream.ended and stream.finished and stream.error is None


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_lines_may_end_with_lf_crlf_or_cr(end: bytes) -> None:
    chunks, stream = read(sse(HELLO, b"[DONE]").replace(b"\n", end))
    assert chunks[0] == content(HELLO)
    assert stream.ended


def test_crlf_cut_in_the_middle_is_one_line_end() -> None:
    chunks, stream = read(b"data: " + HELLO + b"\r", b"\n\r", b"\n", b"", b"data: [DONE]\r", b"\n")
    assert chunks == [content(HELLO)]
    assert not stream.ended  # its blank line has not come
    stream.feed(b"\r\n")
    assert stream.ended


def test_byte_order_mark_at_the_beginning_is_ignored() -> None:
    assert read(b"\xef\xbb\xbf" + sse(HELLO))[0] == [content(HELLO)]
    later = b"\xef\xbb\xbf" + sse(HELLO)
    assert failure_of(sse(HELLO) + later).code == "upstream_garbage"
    assert read(sse(HELLO), later)[1].error == failure_of(sse(HELLO) + later)


def test_comment_is_a_sign_of_life_with_and_without_blank_line() -> None:
    chunks, stream = read(b": hb\n" + sse(HELLO) + b":\n\n: OPENROUTER PROCESSING\n\n")
    assert chunks == [ALIVE, content(HELLO), ALIVE, ALIVE]
    assert stream.error is None


def test_event_id_and_retry_lines_mean_nothing() -> None:
    chunks, stream = read(b"event: message\nid: 7\nretry: 10\n" + sse(HELLO) + b"id\nretry: 1\n\n")
    assert chunks == [content(HELLO)]
    assert stream.error is None


def test_data_on_several_lines_is_one_chunk_on_one_line() -> None:
    chunks, _ = read(b'data: {"choices":\ndata:[{"delta":\ndata: {"content":"a b"}}]}\n\n')
    assert chunks == [content(b'{"choices": [{"delta": {"content":"a b"}}]}')]


def test_half_an_event_at_the_end_is_no_event() -> None:
    chunks, stream = read(sse(HELLO) + b"data: " + HELLO + b"\n")
    assert chunks == [content(HELLO)]
    assert not stream.ended and stream.error is None


def test_nothing_is_read_behind_the_end() -> None:
    chunks, stream = read(sse(HELLO, b"[DONE]", HELLO), sse(b"garbage"))
    assert [chunk.data for chunk in chunks] == [HELLO, b""]
    assert stream.ended and stream.error is None


@pytest.mark.parametrize(
    "before",
    [
        b"",
        b": alive\n\n",
        sse(USAGE),
        sse(b'{"choices":[],"prompt_filter_results":[]}'),
        sse(b'{"choices":[{"index":1,"delta":{"content":"other"}}]}'),
    ],
)
def test_end_without_any_answer_is_truncated(before: bytes) -> None:
    _, stream = read(before + sse(b"[DONE]"))
    assert stream.error is not None and stream.error.code == "upstream_truncated"
    assert not stream.ended


def test_error_inside_is_a_failure_behind_the_chunks_before_it() -> None:
    chunks, stream = read(sse(HELLO, b'{"error": {"message":"overloaded","code":529}}', HELLO))
    assert chunks[0] == content(HELLO)
    assert stream.error is not None and stream.error.code == "upstream_error"
    assert stream.error.body == b'{"message":"overloaded","code":529}'
    assert [chunk.data for chunk in chunks[1:]] == [b""]


def test_error_that_is_null_is_none() -> None:
    data = HELLO[:-1] + b',"error":null}'
    assert read(sse(data))[0] == [content(data)]


def test_usage_before_the_finish_is_usage() -> None:
    chunks, _ = read(sse(HELLO, USAGE, FINISH))
    assert [chunk.usage is not None for chunk in chunks] == [False, True, False]
    assert chunks[2].finish


def test_usage_in_the_finish_chunk_leaves_the_chunk_as_it_came() -> None:
    data = FINISH[:-1] + b',"usage":{"prompt_tokens":1,"completion_tokens":2,"x":{}}}'
    assert read(sse(data))[0] == [ProviderChunk(data, finish=True, usage=ReplyUsage(1, 2))]


NO_USAGE = [
    b"{}",
    b"7",
    b'"many"',
    b'{"prompt_tokens":-1,"completion_tokens":1}',
    b'{"prompt_tokens":1.5,"completion_tokens":1}',
    b'{"prompt_tokens":"1","completion_tokens":1}',
    b'{"prompt_tokens":1,"completion_tokens":%d}' % 10**10,
    b'{"prompt_tokens":1,"completion_tokens":1,"total_tokens":-2}',
]


@pytest.mark.parametrize("usage", NO_USAGE)
def test_what_is_no_usage_is_neither_counted_nor_shown(usage: bytes) -> None:
    data = HELLO[:-1] + b',"usage":' + usage + b"}"
    assert read(sse(data))[0] == [content(HELLO)]
    alone = USAGE[: USAGE.index(b"{", 1)] + usage + b"}"
    assert read(sse(alone))[0] == [ProviderChunk(b'{"choices":[]}')]


def test_usage_that_is_null_leaves_the_chunk_as_it_came() -> None:
    data = HELLO[:-1] + b',"usage":null}'
    assert read(sse(data))[0] == [content(data)]


def test_repeated_role_chunks_pass_on_and_are_no_tokens() -> None:
    chunks, _ = read(sse(ROLE, ROLE, HELLO))
    assert [(chunk.data, chunk.content) for chunk in chunks] == [
        (ROLE, False),
        (ROLE, False),
        (HELLO, True),
    ]


@pytest.mark.parametrize(
    ("delta", "has_content", "text_bytes"),
    [
        (b'{"tool_calls":[{"index":0}]}', True, 0),
        (
            b'{"tool_calls":[{"function":{"name":"add","arguments":"{1}"}}, 5, {"function":7}]}',
            True,
            6,
        ),
        (b'{"refusal":"no"}', True, 2),
        (b'{"content":"gr\xc3\xbc\xc3\x9fe","reasoning_content":"hm"}', True, 9),
        (b'{"audio":{"data":"x"}}', True, 0),
        (b'{"role":"assistant","content":null,"tool_calls":[],"reasoning":""}', False, 0),
        (b"{}", False, 0),
        (b"null", False, 0),
    ],
)
def test_content_is_text_or_a_tool_call_of_any_name(
    delta: bytes, has_content: bool, text_bytes: int
) -> None:
    data = b'{"choices":[{"delta":' + delta + b"}]}"
    expected = ProviderChunk(data, content=has_content, text_bytes=text_bytes)
    assert read(sse(data))[0] == [expected]


def test_finish_reason_that_is_empty_is_none() -> None:
    data = b'{"choices":[{"delta":{"content":"a"},"finish_reason":""}]}'
    chunks, stream = read(sse(data))
    assert chunks == [content(data)]
    assert not stream.finished


def test_chunk_with_two_choices_is_cut_down_to_choice_0() -> None:
    other = b'{"index":1,"delta":{"content":"other"},"finish_reason":"stop"}'
    mine = b'{"index":0,"delta":{"content":"mine"}}'
    wanted = b'{"id":"c","choices":[' + mine + b'],"more":{}}'
    for choices in (mine + b"," + other, other + b"," + mine):
        chunks, stream = read(sse(b'{"id":"c","choices":[' + choices + b'],"more":{}}'))
        assert chunks == [content(wanted)]
        assert not stream.finished


def test_chunk_of_another_choice_alone_is_a_sign_of_life() -> None:
    data = b'{"choices":[{"index":1,"delta":{"content":"b"},"finish_reason":"stop"}]}'
    chunks, stream = read(sse(HELLO, data))
    assert chunks == [content(HELLO), ALIVE]
    assert not stream.finished


def test_object_without_choices_is_a_sign_of_life() -> None:
    assert read(sse(b"{}", b"", b'{"type":"ping"}'))[0] == [ALIVE, ALIVE, ALIVE]
    filters = b'{"choices":[],"prompt_filter_results":[]}'
    assert read(sse(filters))[0] == [ProviderChunk(filters)]


@pytest.mark.parametrize(
    "data",
    [
        b"<!DOCTYPE html>\n<html></html>\n",
        b'{"choices":[]}\n',
        sse(b"<html>"),
        sse(b"1"),
        sse(b'"text"'),
        sse(b"[]"),
        sse(b'{"choices":[}'),
        sse(b'{"choices":1}'),
        sse(b'{"choices":[{"delta":"text"}]}'),
        sse(b'{"choices":[],"other":"\xff"}'),
        sse(b'{"choices":[],"other":"\\ud800 alone"}'),
        sse(b'{"choices":[],"other":"a control \x01 character"}'),
        sse(b'{"choices":[],"other":' + b"[" * 100_000),
        b"\x1f\x8b\x08\x00 gzip\n",
    ],
    ids=lambda data: repr(data[:40]),
)
def test_what_is_no_chunk_is_garbage(data: bytes) -> None:
    assert failure_of(data).code == "upstream_garbage"


def test_event_of_a_mebibyte_passes_and_a_longer_one_is_garbage() -> None:
    def event(length: int) -> bytes:
        return b'{"choices":[],"pad":"' + b"a" * (length - 23) + b'"}'

    longest = event(EVENT_BYTES_MAX - len(b"data: "))
    assert read(sse(longest))[0] == [ProviderChunk(longest)]
    assert failure_of(sse(longest + b" ")).code == "upstream_garbage"
    lines = b"".join(b"data: %s\n" % (b" " * 1000) for _ in range(EVENT_BYTES_MAX // 1000 + 1))
    assert failure_of(lines).code == "upstream_garbage"


def test_event_without_end_is_cut_off_at_its_bound() -> None:
    stream = ProviderStream()
    stream.feed(b"data: ")
    for _ in range(EVENT_BYTES_MAX // 4096):
        stream.feed(b"a" * 4096)
    assert stream.error is not None and stream.error.code == "upstream_garbage"


def test_endless_comments_without_blank_lines_are_no_event() -> None:
    stream = ProviderStream()
    for _ in range(BARE_BYTES_MAX // 11_000):
        assert len(stream.feed(b": 12345678\n" * 1000)) == 1000
    assert stream.error is None


@pytest.mark.parametrize("filler", [b":\n", b"\n", b"id: 7\n", b"data: \n\n"])
def test_flood_that_carries_nothing_is_garbage_until_a_chunk_comes(filler: bytes) -> None:
    stream = ProviderStream()
    flood = filler * (BARE_BYTES_MAX // len(filler) // 2)
    for _ in range(3):
        stream.feed(flood)
        assert stream.feed(sse(HELLO))[-1] == content(HELLO) and stream.error is None
    for _ in range(3):
        stream.feed(flood)
    assert stream.error is not None and stream.error.code == "upstream_garbage"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'{"error":{"message":"no"},"x":1}', b'{"message":"no"}'),
        (b'{"error":"no such model"}', b'{"message":"no such model"}'),
        (b' {"detail":"bad"}\n', b'{"detail":"bad"}'),
        (b'["a"]', b""),
        (b"<html>", b""),
        (b'{"error":{"message":"\xff"}}', b""),
    ],
)
def test_error_object_is_the_providers_own(answer: bytes, expected: bytes) -> None:
    assert error_object(answer) == expected


EVENTS = [
    *(sse(event) for event in (ROLE, HELLO, FINISH, USAGE, b"[DONE]", b"{}", b"nonsense")),
    sse(HELLO).replace(b"\n", b"\r\n"),
    sse(HELLO).replace(b"\n", b"\r"),
    b": comment\n",
    b"id: 1\nretry: 5\r\n",
    b"data: {\ndata:}\n\n",
    b"\xef\xbb\xbf",
    b"data: " + HELLO,
    b"\n",
    b"\r",
    sse('{"choices":[{"delta":{"content":"é🎈\u2028"}}]}'.encode()),
    sse(b'{"error":{"message":"x"}}'),
]


def state(stream: ProviderStream) -> tuple[bool, bool, ReplyError | None]:
    return stream.ended, stream.finished, stream.error


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.data())
def test_cutting_the_bytes_anywhere_changes_nothing(
    parts: Sequence[bytes], data: st.DataObject
) -> None:
    whole = b"".join(parts)
    places = data.draw(st.lists(st.integers(0, len(whole)), max_size=12).map(sorted))
    pieces = [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]
    chunks, stream = read(whole)
    cut_chunks, cut_stream = read(*pieces)
    assert cut_chunks == chunks
    assert state(cut_stream) == state(stream)
    single_chunks, single_stream = read(*(whole[i : i + 1] for i in range(len(whole))))
    assert single_chunks == chunks
    assert state(single_stream) == state(stream)


@given(st.binary(max_size=300), st.integers(0, 300))
def test_any_bytes_end_in_chunks_or_a_failure(data: bytes, place: int) -> None:
    chunks, stream = read(data)
    cut_chunks, cut_stream = read(data[:place], data[place:])
    assert cut_chunks == chunks
    assert state(cut_stream) == state(stream)


AROUND_TEXT = [
    b'{"id":"c1","choices":[{"index":0,"delta":{"content":"%b"}}]}',
    b'{"id":"c1","choices":[{"index":0,"delta":{"role":"assistant","content": "%b"}}]}',
    b'{"id":"c1","choices":[{"index":0,"delta":{"content":"%b","refusal":null}}],"usage":null}',
    b'{"choices":[{"delta":{"content":"?","a\\"content":"%b"}}]}',
    b'{"choices":[{"delta":{"content":"%b","content":"kept"}}]}',
    b'{"choices":[{"delta":{"content":"%b","reasoning":"thought"}}]}',
    b'{"choices":[{"delta":{"content":"a"}},{"index":1,"delta":{"content":"%b"}}]}',
    b'{"choices":[{"index":1,"delta":{"content":"%b"}}]}',
    b'{"choices":[{"delta":{"content":"%b"},"finish_reason":"stop"}]}',
    b'{"choices":[{"delta":{"content":"%b"}}],"error":"%b"}',
    b'{"content":"%b","choices":[{"delta":{"content":"a"}}]}',
    b'{"choices":[{"delta":{"content":"%b"}}],"usage":{"prompt_tokens":1,"completion_tokens":2}}',
    b'{"choices":[{"delta":{"content":"%b"}}],"obfuscation":"%b"}',
]
TEXTS = [
    b"", b"?", b" a", b"\\n\\u00e9", "é🎈\u2028".encode(), b'\\"content\\":\\"b', b"\\\\",
    b"\\", b'"', b'","x":"', b"\n", b"\r", b"\xff", b"\\ud800", b"\x01", b'b"},"y":{"z":"',
]  # fmt: skip


@pytest.mark.parametrize("around", AROUND_TEXT)
@given(st.lists(st.tuples(st.just(0) | st.integers(1, 99), st.sampled_from(TEXTS)), max_size=5))
def test_chunk_is_judged_like_the_one_before_only_if_its_text_alone_differs(
    around: bytes, parts: Sequence[tuple[int, bytes]]
) -> None:
    """Frames of earlier events are used for events that come alone, not for lines."""
    kinds = [around, *AROUND_TEXT]
    events = [sse(kinds[at % len(kinds)].replace(b"%b", text)) for at, text in parts]
    chunks, stream = read(*events)
    line_chunks, line_stream = read(b"".join(events))
    assert chunks == line_chunks
    assert state(stream) == state(line_stream)


@pytest.mark.parametrize("around", AROUND_TEXT[:3])
def test_text_in_the_frame_of_an_earlier_chunk_is_decoded_alone(
    around: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [around.replace(b"%b", text) for text in (b"a", b"bc", "é\\n".encode())]
    first, *others = events
    _, stream = read(sse(first))
    monkeypatch.setattr("holdfast.streaming.provider_stream._decode_all", lambda _: pytest.fail())
    for event in others:
        assert stream.feed(sse(event)) == [content(event)]
