"""Explains an invalid body or query: which field, and what it should be. (Pure.)

msgspec's errors speak to the server's programmers; this module parses them and rewrites
them for the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import inspect

from holdfast.errors import InvalidMessage
from holdfast.wire.codec import LONE_SURROGATE, has_lone_surrogate

VALUE_SHOWN_MAX = 40
TEXT_EXAMINED_MAX = 2048
_AT_PATH = re.compile(r"^(?P<reason>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)
_KINDS = {
    "str": "text", "int": "a whole number", "float": "a number", "bool": "true or false",
    "array": "a list", "object": "an object", "null": "null", "bytes": "text",
    "float | int": "a number", "int | float": "a number",
}  # fmt: skip

_GIVEN = {**_KINDS, "float": "a fraction"}


def invalid_body(error: msgspec.DecodeError, data: bytes, shape: Any) -> InvalidMessage:
    """The error for a body that is not a ``shape``."""
    if isinstance(error, msgspec.ValidationError):
        return _invalid(str(error), shape, "the body")
    if not data.strip():
        return InvalidMessage("the body is empty: send a JSON object")
    if has_lone_surrogate(error, data):
        return InvalidMessage(f"the body {LONE_SURROGATE}")
    why = str(error)
    if why == "Input data was truncated":
        return InvalidMessage("the body is not valid JSON: it ends too early")
    return InvalidMessage(f"the body is not valid JSON: {why.removeprefix('JSON is malformed: ')}")


def invalid_query(error: msgspec.ValidationError, shape: Any) -> InvalidMessage:
    """The error for a query that is not a ``shape``."""
    return _invalid(str(error), shape, "the query")


def said_of(text: str, shape: Any) -> tuple[str, str] | None:
    """(field, text) for a msgspec error about a ``shape``; None if it is not known."""
    reason, path = _parts(text)
    for pattern, say in _REASONS:
        if match := pattern.fullmatch(reason):
            return say(path, match, shape)
    return None


def _invalid(text: str, shape: Any, whole: str) -> InvalidMessage:
    if said := said_of(text, shape):
        field, words = said
        return (
            InvalidMessage(words, field=field)
            if field
            else InvalidMessage(f"{whole} {words.lstrip()}")
        )
    reason, path = _parts(text)
    words = f"{path or whole} is not valid: {reason}"
    return InvalidMessage(words, field=path) if path else InvalidMessage(words)


def _parts(text: str) -> tuple[str, str]:
    """The reason and the path in a msgspec error.

    Its middle is left out if it repeats megabytes of the body: the pattern would take
    100 ms.
    """
    if len(text) > TEXT_EXAMINED_MAX:
        text = text[: TEXT_EXAMINED_MAX // 2] + text[-TEXT_EXAMINED_MAX // 2 :]
    found = _AT_PATH.match(text)
    assert found is not None  # every part of it may be empty
    return found["reason"], (found["path"] or "").replace("[...]", "")


def _missing(path: str, match: re.Match[str], shape: Any) -> tuple[str, str]:
    field = f"{path}.{match[1]}" if path else match[1]
    return field, f"{field} is missing"


def _unknown(path: str, match: re.Match[str], shape: Any) -> tuple[str, str]:
    field = match[1][:VALUE_SHOWN_MAX]
    names = _names(shape, path)
    known = f": there are {', '.join(names)}" if names else ""
    return (f"{path}.{field}" if path else field), f"there is no field {field}{known}"


def _short(path: str, match: re.Match[str], shape: Any) -> tuple[str, str]:
    empty = match[2] == "1"
    return (
        path,
        (
            f"{path} must not be empty"
            if empty
            else f"{path} must have at least {match[2]} {_unit(match[1])}"
        ),
    )


def _long(path: str, match: re.Match[str], shape: Any) -> tuple[str, str]:
    return path, f"{path} must have at most {match[2]} {_unit(match[1])}"


def _unit(kind: str) -> str:
    return "characters" if kind == "str" else "items"


def _low(path: str, match: re.Match[str], shape: Any) -> tuple[str, str]:
    return path, f"{path} must be at least {match[1]}"


def _high(path: str, match: re.Match[str], shape: Any) -> tuple[str, str]:
    return path, f"{path} must be at most {match[1]}"


def _kind(path: str, match: re.Match[str], shape: Any) -> tuple[str, str]:
    wanted = " or ".join(_KINDS.get(kind, kind) for kind in match[1].split(" | "))
    return path, f"{path} must be {wanted}, not {_GIVEN.get(match[2], match[2])}"


def _choice(path: str, match: re.Match[str], shape: Any) -> tuple[str, str]:
    choices = _choices(_at(shape, path))
    return (
        path,
        (
            f"{path} must be one of {', '.join(choices)}"
            if choices
            else f"{path} cannot be {match[1]}"
        ),
    )


def _pattern(path: str, match: re.Match[str], shape: Any) -> tuple[str, str]:
    if match[1] == "^[!-~]+$":
        return path, f"{path} must be printable ASCII without spaces"
    return path, f"{path} must match {match[1]}"


_Say = Callable[[str, "re.Match[str]", Any], tuple[str, str]]
_REASONS: tuple[tuple[re.Pattern[str], _Say], ...] = (
    (re.compile(r"Object missing required field `(.+)`"), _missing),
    (re.compile(r"Object contains unknown field `(.*)`", re.DOTALL), _unknown),
    (re.compile(r"Expected `(\w+)` of length >= (\d+)"), _short),
    (re.compile(r"Expected `(\w+)` of length <= (\d+)"), _long),
    (re.compile(r"Expected `(?:int|float)` >=? (\S+)"), _low),
    (re.compile(r"Expected `(?:int|float)` <=? (\S+)"), _high),
    (re.compile(r"Expected `str` matching regex '(.+)'"), _pattern),
    (re.compile(r"Expected `([^`]+)`, got `([^`]+)`"), _kind),
    (re.compile(r"Invalid enum value (.+)", re.DOTALL), _choice),
)


def _at(shape: Any, path: str) -> Any:
    """The type of the value at ``path``; None if unknown."""
    kind: Any = inspect.type_info(shape)
    for step in re.findall(r"[^.\[\]]+|\[\d*\]", path):
        kind = _bare(kind)
        if step.startswith("["):
            kind = getattr(kind, "item_type", None)
        else:
            kind = next(
                (f.type for f in getattr(kind, "fields", ()) if f.encode_name == step), None
            )
    return _bare(kind)


def _bare(kind: Any) -> Any:
    """A type without its "or null" and without its bounds."""
    while True:
        if isinstance(kind, inspect.Metadata):
            kind = kind.type
        elif isinstance(kind, inspect.UnionType) and len(kind.types) == 2:
            kind = next(t for t in kind.types if not isinstance(t, inspect.NoneType))
        else:
            return kind


def _choices(kind: Any) -> list[str]:
    return [str(value) for value in kind.values] if isinstance(kind, inspect.LiteralType) else []


def _names(shape: Any, path: str) -> list[str]:
    return [field.encode_name for field in getattr(_at(shape, path), "fields", ())]
