"""What rules shall be: said on the command line, or in a file as `holdfast rules export` prints it.

A file is judged whole, and compared with what is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import InvalidMessage, InvalidRule
from holdfast.limits.form import NAMES, new_rule, settable
from holdfast.limits.rules import Rule, RuleName

FIELDS = tuple(field for field in NAMES if field not in ("tenantID", "resource"))
"""What can be set of a rule."""
NUMBERS = ("limit", "burstSize")
NUMBER = re.compile(r"-?[0-9]{1,18}")
UNSET = "none"
SAID_MAX = 10
"""Of so many mistakes in a file each is told."""


class Step(NamedTuple):
    """One change on the way to what the file says: a whole rule, upon the version that is there, or a new one."""

    body: dict[str, Any]
    version: int | None
    changed: list[str]

    @property
    def label(self) -> str:
        return f"{self.body['tenantID']} {self.body['resource']}"


def assigned(texts: Iterable[str]) -> dict[str, Any]:
    """What a command line of FIELD=VALUE says."""
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


def read(file: Path) -> list[Rule]:
    """The rules of a file. InvalidMessage names what is wrong with any of them."""
    try:
        bodies = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    except OSError as error:
        raise InvalidMessage(f"{file} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"{file} is not what `holdfast rules export` prints: {error}") from None
    rules: dict[RuleName, Rule] = {}
    wrong: list[str] = []
    for place, body in enumerate(bodies, 1):
        try:
            rule = new_rule(body)
            if rule.name in rules:
                raise InvalidRule("is in the file twice")
            rules[rule.name] = rule
        except InvalidRule as error:
            wrong.append(f"rule {place} ({body.get('tenantID')} {body.get('resource')}): {error.message}")
    if wrong:
        more = f"\n… and {len(wrong) - SAID_MAX} more" if len(wrong) > SAID_MAX else ""
        raise InvalidMessage(f"{file}: nothing was changed:\n" + "\n".join(wrong[:SAID_MAX]) + more)
    return list(rules.values())


def plan(wanted: Iterable[Rule], there: Iterable[Mapping[str, Any]]) -> Iterator[Step]:
    """What to change of the rules that are there, in the order of the file; rules that are not in it stay."""
    present = {(rule["tenantID"], rule["resource"]): rule for rule in there}
    for rule in wanted:
        body = {"burstSize": None, **settable(rule)}
        now = present.get(rule.name)
        if now is None:
            yield Step(body, None, sorted(FIELDS))
        elif changed := differences(now, body):
            yield Step(body, now["version"], sorted(changed))


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], fields: Iterable[str] = FIELDS
) -> dict[str, tuple[Any, Any]]:
    """Fields that are not the same in two states of a rule, with both."""
    return {name: (old.get(name), new.get(name)) for name in fields if old.get(name) != new.get(name)}


def portable(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule as a file has it."""
    return {name: rule[name] for name in NAMES if name in rule}
