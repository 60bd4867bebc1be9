"""What one admin call does to one rule, decided from values; the rule stores only carry it out. (Pure.)

Every change raises the version by one, under the epoch of the primary that commits it; a deletion leaves a
tombstone, and a later creation goes on from its version. A call that brings an idempotency key gets the answer
that was given first, whatever has happened since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs

from holdfast.errors import HoldfastError, KeyReused, NotFound, VersionConflict
from holdfast.limits.rule_json import changed_rule, new_rule, render, settable
from holdfast.limits.rules import ANY, AnyRule, Rule, RuleName, UnreadableRule

_Action = Literal["create", "update", "delete", "rollback"]


class Change(Struct, frozen=True):
    """One admin call. ``body`` holds the rule's fields; ``expected_version`` is what the caller saw."""

    action: _Action
    name: RuleName
    actor: str
    at: str
    body: Mapping[str, Any] = {}
    expected_version: int | None = None
    reason: str = ""
    key: str | None = None

    @property
    def fingerprint(self) -> str:
        """Tells a repetition from another request under the same key."""
        said = (self.action, self.name, sorted(self.body.items()), self.expected_version, self.reason)
        return hashlib.blake2b(msgspec.json.encode(said), digest_size=16).hexdigest()


class RuleChange(Struct, frozen=True):
    """One line of the log: the feed of the nodes, the outbox and the audit history in one."""

    seq: int
    action: str
    rule: AnyRule
    actor: str
    reason: str
    at: str
    change_id: str = ""
    """Of an import: the same for all that it changed."""


class RuleChangeResult(Struct, frozen=True):
    """The answer to a change; ``repeated`` if the key had been used for it before."""

    rule: AnyRule
    seq: int
    repeated: bool = False


class Remembered(Struct, frozen=True):
    """An idempotency key with its answer: the rule, or of an import its ``rule_import.ImportResult``."""

    fingerprint: str
    rule: AnyRule | None
    seq: int
    imported: dict[str, Any] | None = None


def decide(
    change: Change, current: AnyRule | None, remembered: Remembered | None, epoch: int, forgotten_version: int = 0
) -> Rule | RuleChangeResult:
    """The rule to write, or the answer given before. Raises NotFound, VersionConflict, KeyReused, InvalidRule.

    ``current`` may be a tombstone; a name without one may have had one, of ``forgotten_version`` at most. An update
    without ``expected_version`` is made upon whatever is there, and one of a rule that cannot be read must be a
    whole rule.
    """
    if remembered is not None:
        check_key(remembered, change.fingerprint)
        assert remembered.rule is not None
        return RuleChangeResult(remembered.rule, remembered.seq, repeated=True)
    version = (current.version if current is not None else forgotten_version) + 1
    made = structs.replace(
        _content(change, current), epoch=epoch, version=version, updated_at=change.at, updated_by=change.actor
    )
    return structs.replace(made, deleted=change.action == "delete")


def check_key(remembered: Remembered, fingerprint: str) -> None:
    """KeyReused unless the key was used for this very request."""
    if remembered.fingerprint != fingerprint:
        why = "was used for another request"
        raise KeyReused(f"this idempotency key {why}; use a new one", fields={"idempotencyKey": why})


def is_over(past: RuleChange, current: AnyRule | None) -> bool:
    """Whether this change, on its way out of the log, left a tombstone that nothing has come after.

    What held for every tenant stays known: a default rule that an operator deleted must not be made again.
    """
    return past.rule.deleted and past.rule.tenant != ANY and current is not None and current.stamp == past.rule.stamp


def _content(change: Change, current: AnyRule | None) -> Rule:
    there = current if current is not None and not current.deleted else None
    match change.action:
        case "create":
            made = _whole(change)
            if there is not None:
                raise conflict(change, there)
            return made
        case "rollback":
            # The body is a whole earlier rule: it may bring a deleted one back, of the version that was seen deleted.
            if current is not None:
                _expect(change, current)
            return _whole(change)
        case "update" | "delete":
            if there is None:
                raise missing(change.name)
            _expect(change, there)
            if change.action == "update":
                return _whole(change) if isinstance(there, UnreadableRule) else changed_rule(there, change.body)
            return _nothing_of(change.name) if isinstance(there, UnreadableRule) else there


def _whole(change: Change) -> Rule:
    return new_rule({**change.body, "tenantID": change.name.tenant, "resource": change.name.resource})


def _nothing_of(name: RuleName) -> Rule:
    """What a tombstone says where the rule that it stands for cannot be read: every version can read this."""
    return Rule(*name, "token_bucket", 1, 1.0)


def _expect(change: Change, there: AnyRule) -> None:
    if change.expected_version is not None and change.expected_version != there.version:
        raise conflict(change, there)


def missing(name: RuleName) -> HoldfastError:
    return NotFound(f"there is no rule for tenant {name.tenant} and resource {name.resource}")


def conflict(change: Change, there: AnyRule) -> HoldfastError:
    why = f"expected version {change.expected_version}, but rule was already updated"
    if change.expected_version is None:
        why = f"the rule exists already, at version {there.version}"
    return VersionConflict(
        f"version conflict: {why}",
        currentVersion=there.version,
        rule=render(there),
    )


def rollback_body(earlier: Rule) -> dict[str, Any]:
    """The fields that make the rule what it was."""
    body = settable(earlier)
    del body["tenantID"], body["resource"]
    return body
