"""Rules as the databases and doorbells keep them, read one by one. (No I/O.)

While nodes are upgraded one after the other, an older one meets rules with a word that it does not know. It leaves
those out, says so, and goes on with all the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec
from msgspec import Struct

from holdfast import telemetry
from holdfast.limits.changes import RuleChange
from holdfast.limits.rules import Rule, Snapshot
from holdfast.limits.rulestore.bell import LISTENING
from holdfast.limits.rulestore.contract import Ring

T = TypeVar("T")


class _Stamped(Struct, frozen=True):
    epoch: int


class _Place(Struct, frozen=True):
    """What can be read of any change: where it stands in the log."""

    seq: int
    rule: _Stamped


_rule = msgspec.json.Decoder(Rule)
_change = msgspec.json.Decoder(RuleChange)
_ring = msgspec.json.Decoder(Ring)
_place = msgspec.json.Decoder(_Place)


def snapshot_of(epoch: int, seq: int, store: str, bodies: Iterable[str]) -> Snapshot:
    """All rules that can be read; ``whole`` if that is all there are."""
    read = [_readable(_rule, body) for body in bodies]
    rules = tuple(rule for rule in read if rule is not None)
    return Snapshot(epoch, seq, rules, len(rules) == len(read), store)


def rules_of(bodies: Iterable[str]) -> list[Rule]:
    """The rules that can be read."""
    return [rule for body in bodies if (rule := _readable(_rule, body)) is not None]


def changes_of(bodies: Iterable[str]) -> list[RuleChange]:
    """The changes that can be read, in their order; a reader finds by the digest that it does not have all."""
    return [change for body in bodies if (change := _readable(_change, body)) is not None]


def ring_of(body: str, store: str) -> Ring:
    """The ring for one change of a store's log; without its rule if that cannot be read here: others may know it."""
    change = _readable(_change, body)
    if change is not None:
        return Ring(change.rule.epoch, change.seq, change.rule, store)
    place = _place.decode(body)
    return Ring(place.rule.epoch, place.seq, store=store)


def heard_ring(payload: str | bytes) -> Ring:
    """What a doorbell said; one that cannot be understood still says: look."""
    ring = _readable(_ring, payload)
    return ring if ring is not None else LISTENING


def _readable(decoder: msgspec.json.Decoder[T], body: str | bytes) -> T | None:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        telemetry.log.error("limits.rule_unreadable", reason=str(error))
        return None
