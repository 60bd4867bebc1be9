"""A request of the responses API as a chat completion. (Pure.)

Text and function tools. Nothing of an earlier response is known, so what needs that is
refused by its field's name; so are tools that OpenAI runs itself. Fields that only the
responses API has are read here or shown again; all others go to the provider as they
came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.streaming.dialects.contract import DialectRequest
from holdfast.streaming.dialects.request_body import (
    decode,
    invalid,
    read,
    read_model,
    read_output_tokens,
    read_user,
)

METADATA_PAIRS_MAX, METADATA_NAME_MAX, METADATA_VALUE_MAX = 16, 64, 512
_REFUSED = {
    "previous_response_id": "is not supported: send the whole conversation as input",
    "conversation": "is not supported: send the whole conversation as input",
    "prompt": "is not supported: send the prompt's text as instructions",
}
_READ = frozenset(
    {
        "background", "include", "input", "instructions", "max_output_tokens", "max_tool_calls",
        "metadata", "model", "reasoning", "store", "stream", "stream_options", "text",
        "tool_choice", "tools", "top_logprobs", "truncation", *_REFUSED,
    }
)  # fmt: skip


class ShownRequest(Struct, frozen=True, omit_defaults=True):
    """What of the request a response shows. Never its text: that is not stored.

    So ``instructions`` and ``tools`` of a response are empty.
    """

    background: bool = False
    store: bool = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    parallel_tool_calls: bool = True
    tool_choice: Any = "auto"
    metadata: Mapping[str, str] = {}
    user: str | None = None


class _Part(Struct):
    type: str
    text: str = ""
    refusal: str = ""


class _Item(Struct):
    """An item of ``input``; which fields it has depends on its type."""

    type: str = "message"
    role: str = ""
    content: str | list[_Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[_Part] = ""


class _Function(Struct):
    type: str
    name: str = ""
    description: str | UnsetType | None = UNSET
    parameters: Raw | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class _ToolChoice(Struct):
    type: str
    name: str = ""


class _Format(Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | UnsetType | None = UNSET
    schema: Raw | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class _Text(Struct):
    format: _Format | None = None
    verbosity: str | None = None


class _Reasoning(Struct):
    effort: str | None = None


def read_request(fields: Mapping[str, Raw]) -> DialectRequest:
    """InvalidMessage names the field that is wrong or not supported."""
    for name, why in _REFUSED.items():
        if name in fields and bytes(fields[name]) != b"null":
            raise invalid(name, why)
    shown = _shown(fields)
    if shown.background and not shown.store:
        raise invalid("store", "must not be false for a background response: nobody could read it")
    made = {name: bytes(raw) for name, raw in fields.items() if name not in _READ}
    made.update({name: msgspec.json.encode(value) for name, value in _converted(fields).items()})
    return DialectRequest(
        model=read_model(fields),
        stream=bool(read(fields, "stream", bool, "true or false")),
        fields=made,
        user=read_user(fields),
        max_output_tokens=shown.max_output_tokens,
        shown=msgspec.json.encode(shown).decode(),
        store=shown.store,
        background=shown.background,
    )


def _shown(fields: Mapping[str, Raw]) -> ShownRequest:
    def flag(name: str, default: bool) -> bool:
        given = read(fields, name, bool, "true or false")
        return default if given is None else given

    return ShownRequest(
        background=flag("background", False),
        store=flag("store", True),
        max_output_tokens=read_output_tokens(fields, "max_output_tokens"),
        temperature=read(fields, "temperature", float, "a number"),
        top_p=read(fields, "top_p", float, "a number"),
        parallel_tool_calls=flag("parallel_tool_calls", True),
        tool_choice=_tool_choice(fields),
        metadata=_metadata(fields),
        user=read_user(fields) or None,
    )


def _metadata(fields: Mapping[str, Raw]) -> Mapping[str, str]:
    metadata: dict[str, str] = read(fields, "metadata", dict[str, str], "an object of texts") or {}
    if len(metadata) > METADATA_PAIRS_MAX or any(
        len(name) > METADATA_NAME_MAX or len(value) > METADATA_VALUE_MAX
        for name, value in metadata.items()
    ):
        raise invalid(
            "metadata",
            f"has at most {METADATA_PAIRS_MAX} names of {METADATA_NAME_MAX} characters with texts"
            f" of {METADATA_VALUE_MAX}",
        )
    return metadata


def _tool_choice(fields: Mapping[str, Raw]) -> Any:
    choice = read(fields, "tool_choice", str | _ToolChoice, "a word or an object")
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto"
    if not isinstance(choice, _ToolChoice) or choice.type != "function" or not choice.name:
        raise invalid("tool_choice", "must be auto, none, required or a function by its name")
    if len(choice.name) > METADATA_NAME_MAX:
        raise invalid("tool_choice", "names a function with a longer name than may be")
    return {"type": "function", "name": choice.name}


def _converted(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """The fields that chat completions have in another shape."""
    made: dict[str, Any] = {"messages": _messages(fields)}
    if (tokens := read_output_tokens(fields, "max_output_tokens")) is not None:
        made["max_completion_tokens"] = tokens
    if tools := _tools(fields):
        made["tools"] = tools
        choice = _tool_choice(fields)
        named = isinstance(choice, dict)
        made["tool_choice"] = (
            {"type": "function", "function": {"name": choice["name"]}} if named else choice
        )
    if (text := read(fields, "text", _Text, "an object")) is not None:
        made.update(_text_options(text))
    reasoning = read(fields, "reasoning", _Reasoning, "an object")
    if reasoning is not None and reasoning.effort is not None:
        made["reasoning_effort"] = reasoning.effort
    if (number := read(fields, "top_logprobs", int, "a whole number")) is not None:
        made.update(logprobs=True, top_logprobs=number)
    return made


def _text_options(text: _Text) -> dict[str, Any]:
    made: dict[str, Any] = {} if text.verbosity is None else {"verbosity": text.verbosity}
    match text.format:
        case _Format(type="json_object"):
            made["response_format"] = {"type": "json_object"}
        case _Format(type="json_schema", name=name, schema=schema) as asked:
            if not name or schema is UNSET:
                raise invalid("text.format", "must have a name and a schema")
            schema_fields = _given(asked, "name", "description", "schema", "strict")
            made["response_format"] = {"type": "json_schema", "json_schema": schema_fields}
        case _:
            pass
    return made


def _given(struct: Struct, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(struct, name)) is not UNSET}


def _tools(fields: Mapping[str, Raw]) -> list[dict[str, Any]]:
    made = []
    tools = read(fields, "tools", list[Raw], "a list of tools") or []
    for at, raw in enumerate(tools):
        tool = decode(bytes(raw), f"tools[{at}]", _Function, "a tool with its type")
        if tool.type != "function":
            raise invalid(
                f"tools[{at}].type", f"must be function: {tool.type[:64]} is run by its provider"
            )
        if not tool.name:
            raise invalid(f"tools[{at}].name", "is missing")
        function = _given(tool, "name", "description", "parameters", "strict")
        made.append({"type": "function", "function": function})
    return made


def _messages(fields: Mapping[str, Raw]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if instructions := read(fields, "instructions", str, "text"):
        made.append({"role": "system", "content": instructions})
    given = read(fields, "input", str | list[Raw], "text or a list of items")
    if not given:
        raise invalid("input", "is missing or empty: send text or a list of items")
    if isinstance(given, str):
        return [*made, {"role": "user", "content": given}]
    for at, raw in enumerate(given):
        name = f"input[{at}]"
        _add(
            made, decode(bytes(raw), name, _Item, "a message, a function call or its output"), name
        )
    return made


def _add(messages: list[dict[str, Any]], item: _Item, name: str) -> None:
    """Append an item. Calls join the assistant's message before them: chat completions
    have all calls of a turn in one message."""
    match item.type:
        case "message":
            role = "system" if item.role == "developer" else item.role
            if role not in ("user", "system", "assistant"):
                raise invalid(f"{name}.role", "must be user, assistant, system or developer")
            messages.append({"role": role, "content": _content(item.content, f"{name}.content")})
        case "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            if not item.name or not item.call_id:
                raise invalid(name, "must have call_id and name")
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        case "function_call_output":
            if not item.call_id:
                raise invalid(f"{name}.call_id", "is missing")
            content = _content(item.output, f"{name}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        case other:
            raise invalid(f"{name}.type", f"is not supported here: {other[:64]}")


def _content(content: str | Sequence[_Part] | None, name: str) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for at, part in enumerate(content):
        if part.type in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": part.text})
        elif part.type == "refusal":
            parts.append({"type": "refusal", "refusal": part.refusal})
        else:
            raise invalid(f"{name}[{at}].type", f"is not supported here: {part.type[:64]}")
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts
