"""What one admin call does to one rule, decided from values. (Pure.)

The rule stores only carry it out. Every change raises the version by one, under the
epoch of the primary that commits it. A deletion leaves a tombstone, and a later
creation continues from its version. A call with an idempotency key gets the first
answer again, whatever has happened since.
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
    """One admin call.

    ``body`` has the rule's fields; ``expected_version`` is the version the caller saw.
    """

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
        """Distinguishes a repetition from another request under the same key."""
        said = (
            self.action,
            self.name,
            sorted(self.body.items()),
            self.expected_version,
            self.reason,
        )
        return hashlib.blake2b(msgspec.json.encode(said), digest_size=16).hexdigest()


class RuleChange(Struct, frozen=True):
    """One log entry: the nodes' feed, the outbox and the audit history in one."""

    seq: int
    action: str
    rule: AnyRule
    actor: str
    reason: str
    at: str
    change_id: str = ""
    """Shared by all changes of one import."""


class RuleChangeResult(Struct, frozen=True):
    """The answer to a change; ``repeated`` if its key was used for it before."""

    rule: AnyRule
    seq: int
    repeated: bool = False


class Remembered(Struct, frozen=True):
    """An idempotency key and its answer: a rule, or a ``rule_import.ImportResult``."""

    fingerprint: str
    rule: AnyRule | None
    seq: int
    imported: dict[str, Any] | None = None


def decide(
    change: Change,
    current: AnyRule | None,
    remembered: Remembered | None,
    epoch: int,
    forgotten_version: int = 0,
) -> Rule | RuleChangeResult:
    """The rule to write, or the answer given before.

    Raises NotFound, VersionConflict, KeyReused, InvalidRule. ``current`` may be a
    tombstone. A name without one may have had one, of ``forgotten_version`` at most. An
    update without ``expected_version`` applies to the current rule. An update of an
    unreadable rule must be a whole rule.
    """
    if remembered is not None:
        check_key(remembered, change.fingerprint)
        assert remembered.rule is not None
        return RuleChangeResult(remembered.rule, remembered.seq, repeated=True)
    version = (current.version if current is not None else forgotten_version) + 1
    made = structs.replace(
        _content(change, current),
        epoch=epoch,
        version=version,
        updated_at=change.at,
        updated_by=change.actor,
    )
    return structs.replace(made, deleted=change.action == "delete")


def check_key(remembered: Remembered, fingerprint: str) -> None:
    """KeyReused unless the key was used for this same request."""
    if remembered.fingerprint != fingerprint:
        why = "was used for another request"
        raise KeyReused(
            f"this idempotency key {why}; use a new one", fields={"idempotencyKey": why}
        )


def is_over(past: RuleChange, current: AnyRule | None) -> bool:
    """Whether a change that leaves the log left a tombstone that is still current.

    Tombstones of ``*`` are kept: a default rule that an operator deleted must not come
    back.
    """
    return (
        past.rule.deleted
        and past.rule.tenant != ANY
        and current is not None
        and current.stamp == past.rule.stamp
    )


def _content(change: Change, current: AnyRule | None) -> Rule:
    there = current if current is not None and not current.deleted else None
    match change.action:
        case "create":
            made = _whole(change)
            if there is not None:
                raise conflict(change, there)
            return made
        case "rollback":
            # A whole earlier rule may also restore a deleted one, if the caller expects
            # that version.
            if current is not None:
                _expect(change, current)
            return _whole(change)
        case "update" | "delete":
            if there is None:
                raise missing(change.name)
            _expect(change, there)
            if change.action == "update":
                return (
                    _whole(change)
                    if isinstance(there, UnreadableRule)
                    else changed_rule(there, change.body)
                )
            return _nothing_of(change.name) if isinstance(there, UnreadableRule) else there


def _whole(change: Change) -> Rule:
    return new_rule(
        {**change.body, "tenantID": change.name.tenant, "resource": change.name.resource}
    )


def _nothing_of(name: RuleName) -> Rule:
    """A tombstone for an unreadable rule, which every version can read."""
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
    """The fields that restore the rule."""
    body = settable(earlier)
    del body["tenantID"], body["resource"]
    return body
