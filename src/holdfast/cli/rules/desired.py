"""The rules a user asks for, on the command line or in a file from ``rules export``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import InvalidMessage, InvalidRule
from holdfast.limits.rule_import import read_rules
from holdfast.limits.rule_json import NAMES, settable

FIELDS = tuple(field for field in NAMES if field not in ("tenantID", "resource"))
"""The fields of a rule that can be set."""
NUMBERS = ("limit", "burstSize")
NUMBER = re.compile(r"-?[0-9]{1,18}")
UNSET = "none"


def assigned(texts: Iterable[str]) -> dict[str, Any]:
    """The fields given as FIELD=VALUE."""
    said: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in FIELDS:
            raise InvalidMessage(f"{text!r} is no FIELD=VALUE with a field of {', '.join(FIELDS)}")
        if name in said:
            raise InvalidMessage(f"{name} is given twice; give it once")
        said[name] = _value(name, value)
    return said


def _value(name: str, text: str) -> Any:
    if name == "burstSize" and text == UNSET:
        return None
    return int(text) if name in NUMBERS and NUMBER.fullmatch(text) else text


def read(file: Path) -> list[dict[str, Any]]:
    """The rules of a file. InvalidMessage lists what is wrong with them."""
    try:
        bodies = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    except OSError as error:
        raise InvalidMessage(f"{file} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidMessage(
            f"{file} is not what `holdfast rules export` prints: {error}"
        ) from None
    try:
        return [settable(rule) for rule in read_rules(bodies)]
    except InvalidRule as error:
        raise InvalidMessage(f"{file}: nothing was changed:\n{error.message}") from None


def portable(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule as a file has it."""
    return {name: rule[name] for name in NAMES if name in rule}
