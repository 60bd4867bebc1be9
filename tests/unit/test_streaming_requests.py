"""Requests for replies: what each dialect reads, and what it refuses by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.errors import InvalidMessage, MessageTooLarge
from holdfast.streaming.dialects import chat, native, responses_request
from holdfast.streaming.dialects.contract import DialectRequest
from holdfast.streaming.dialects.request_body import STRUCTURE_MAX, split

USER = {"role": "user", "content": "hi"}


def chat_request(**fields: Any) -> DialectRequest:
    body = {"model": "small", "messages": [USER], **fields}
    return chat.read_request(split(json.dumps(body).encode()))


def response_request(**fields: Any) -> DialectRequest:
    body = {"model": "small", "input": "hi", **fields}
    return responses_request.read_request(split(json.dumps(body).encode()))


def sent(request: DialectRequest, name: str) -> Any:
    return json.loads(request.fields[name])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "JSON"),
        (b"<html>", "JSON"),
        (b"[1]", "JSON object"),
        (b'{"a":1', "JSON"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b'{"a":{"b":"x\xc3"}}', "UTF-8"),
        (b'{"a":"\\ud800 alone in its text"}', "surrogate"),
        (b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}", "deeply"),
        (b'{"a":' + b'{"a":' * 40_000, "deeply"),
        (b"{" + b",".join(b'"%d":0' % n for n in range(201)) + b"}", "200 fields"),
    ],
    ids=["empty", "html", "array", "cut", "latin-1", "cut utf-8", "surrogate", "arrays", "objects",
         "fields"],
)  # fmt: skip
def test_body_that_is_no_good_json_object_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(InvalidMessage, match=why):
        split(body)


def test_body_with_too_much_structure_is_too_large() -> None:
    split(b'{"a":[' + b",".join([b"1"] * (STRUCTURE_MAX - 1)) + b"]}")
    with pytest.raises(MessageTooLarge):
        split(b'{"a":[' + b",".join([b"1"] * STRUCTURE_MAX) + b"]}")


def test_body_with_a_character_at_the_edge_of_a_piece_is_valid() -> None:
    split(b'{"a":"' + "é".encode() * 300_000 + b'"}')


def test_chat_request_passes_unknown_fields_as_the_bytes_that_came() -> None:
    body = b'{"model":"small","messages":[{"role":"user","x":1e400}],"top_k": 1.50,"stream":true}'
    request = chat.read_request(split(body))
    assert request.fields == {"messages": b'[{"role":"user","x":1e400}]', "top_k": b"1.50"}
    assert (request.model, request.stream, request.shown) == ("small", True, "")


def test_chat_request_says_what_admission_and_rendering_need() -> None:
    request = chat_request(
        max_tokens=7, stream_options={"include_usage": True}, user="bob", safety_identifier="al"
    )
    assert (request.max_output_tokens, request.user) == (7, "al")
    assert request.shown and "stream_options" not in request.fields
    assert chat_request(max_tokens=7, max_completion_tokens=5).max_output_tokens == 5


def test_user_that_is_no_id_counts_by_its_hash() -> None:
    one, other = (chat_request(user=f"{n} Ünknown " * 50).user for n in (1, 2))
    assert one != other and one == chat_request(user="1 Ünknown " * 50).user
    assert len(one) <= 64 and one.isascii()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"n": "1"}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**40}, "max_completion_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"tools": [{"name": "x"}]}, "tools"),
        ({"tools": "all"}, "tools"),
        ({"user": 7}, "user"),
    ],
)
def test_chat_request_that_is_wrong_names_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidMessage) as refused:
        chat_request(**fields)
    assert refused.value.details["field"] == field


def test_native_request_has_no_choice_of_streaming() -> None:
    with pytest.raises(InvalidMessage) as refused:
        native.read_request(split(b'{"model":"m","messages":[{}],"stream":false}'))
    assert refused.value.details["field"] == "stream"


def test_response_request_of_text_is_a_conversation_of_one_message() -> None:
    request = response_request(instructions="Be brief.", temperature=0.5, top_k=4)
    assert sent(request, "messages") == [{"role": "system", "content": "Be brief."}, USER]
    assert sent(request, "temperature") == 0.5 and sent(request, "top_k") == 4
    assert request.store and not request.background and not request.stream
    assert not {"input", "instructions", "store", "model"} & set(request.fields)


def test_response_request_of_items_has_calls_in_one_message() -> None:
    request = response_request(
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
            {"type": "message", "role": "user", "content": "Weather?"},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "Let me see", "annotations": []}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "rain"},
            {"type": "function_call_output", "call_id": "b",
             "output": [{"type": "input_text", "text": "noon"}]},
        ]
    )  # fmt: skip
    messages = sent(request, "messages")
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "tool"]
    assert messages[2]["content"] == "Let me see"
    assert [c["id"] for c in messages[2]["tool_calls"]] == ["a", "b"]
    assert messages[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}
    assert messages[3:] == [
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
    ]


def test_response_request_converts_tools_formats_and_limits() -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "number", "default": 1.0}}}
    request = response_request(
        tools=[{"type": "function", "name": "f", "parameters": parameters, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        max_output_tokens=9,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        reasoning={"effort": "low"},
        metadata={"a": "b"},
    )
    function = {"name": "f", "parameters": parameters, "strict": True}
    assert sent(request, "tools") == [{"type": "function", "function": function}]
    assert sent(request, "tool_choice") == {"type": "function", "function": {"name": "f"}}
    assert sent(request, "max_completion_tokens") == 9 == request.max_output_tokens
    schema = {"name": "n", "schema": {"type": "object"}}
    assert sent(request, "response_format") == {"type": "json_schema", "json_schema": schema}
    assert sent(request, "reasoning_effort") == "low"
    assert "metadata" not in request.fields and '"metadata":{"a":"b"}' in request.shown


def test_response_request_stores_none_of_its_text() -> None:
    request = response_request(
        instructions="SECRET", input="SECRET", tools=[{"type": "function", "name": "SECRET"}]
    )
    assert "SECRET" not in request.shown


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [7]}, "tools[0]"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"store": False, "background": True}, "store"),
        ({"store": "no"}, "store"),
        ({"background": 1}, "background"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"max_output_tokens": -5}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "yaml"}}}, "text"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_response_request_that_is_wrong_names_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidMessage) as refused:
        response_request(**fields)
    assert refused.value.details["field"] == field


def test_response_request_with_null_fields_is_as_without_them() -> None:
    nothing = dict.fromkeys(
        ["previous_response_id", "conversation", "tools", "tool_choice", "store", "background",
         "metadata", "max_output_tokens", "text", "reasoning", "instructions", "stream"]
    )  # fmt: skip
    assert response_request(**nothing) == response_request()
