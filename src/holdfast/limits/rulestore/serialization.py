"""Rules and changes as databases and notifications carry them. (No I/O.)

During a rolling upgrade an older node meets rules with words it does not know. It logs
each one and continues with all others. Operators still see such a rule, and can replace
or delete it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct, structs

from holdfast import telemetry
from holdfast.limits.rule_changes import Remembered, RuleChange
from holdfast.limits.rules import AnyRule, Rule, RuleName, RuleSnapshot, UnreadableRule
from holdfast.limits.rulestore.contract import ChangeNotification
from holdfast.limits.rulestore.notifications import LISTENING


class _Line(Struct, frozen=True):
    """A change whose rule is not decoded yet."""

    seq: int
    rule: Raw
    action: str = ""
    actor: str = ""
    reason: str = ""
    at: str = ""
    change_id: str = ""


class _Key(Struct, frozen=True):
    """An idempotency key whose rule is not decoded yet."""

    fingerprint: str
    rule: Raw
    seq: int
    imported: dict[str, Any] | None = None


_rule = msgspec.json.Decoder(Rule)
_unreadable = msgspec.json.Decoder(UnreadableRule)
_line = msgspec.json.Decoder(_Line)
_key = msgspec.json.Decoder(_Key)
_notification = msgspec.json.Decoder(ChangeNotification)


def text_of(value: Struct | Sequence[RuleName] | tuple[str, ...]) -> str:
    """As the stores keep it."""
    return msgspec.json.encode(value).decode()


def rule_of(body: str | Raw) -> AnyRule:
    try:
        return _rule.decode(body)
    except msgspec.ValidationError as error:
        telemetry.log.error("limits.rule_unreadable", reason=str(error))
        return structs.replace(_unreadable.decode(body), why=str(error))


def change_of(body: str) -> RuleChange:
    line = _line.decode(body)
    return RuleChange(
        line.seq, line.action, rule_of(line.rule), line.actor, line.reason, line.at, line.change_id
    )


def remembered_of(body: str) -> Remembered:
    key = _key.decode(body)
    rule = rule_of(key.rule) if key.imported is None else None
    return Remembered(key.fingerprint, rule, key.seq, key.imported)


def snapshot_of(epoch: int, seq: int, store: str, bodies: Iterable[str]) -> RuleSnapshot:
    """All readable rules; ``whole`` if that is all of them."""
    read = [rule_of(body) for body in bodies]
    rules = readable(read)
    return RuleSnapshot(epoch, seq, tuple(rules), len(rules) == len(read), store)


def readable(rules: Iterable[AnyRule]) -> list[Rule]:
    return [rule for rule in rules if isinstance(rule, Rule)]


def notification_of(body: str, store: str) -> ChangeNotification:
    """The notification of a log entry, without its rule if that is unreadable here."""
    change = change_of(body)
    rule = change.rule if isinstance(change.rule, Rule) else None
    return ChangeNotification(change.rule.epoch, change.seq, rule, store)


def decode_notification(payload: str | bytes) -> ChangeNotification:
    """Decode a notification; an unreadable one becomes one that only causes a read."""
    try:
        return _notification.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        telemetry.log.error("limits.rule_unreadable", reason=str(error))
        return LISTENING
