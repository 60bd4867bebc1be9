"""Many rules set to what a file says, in one change: all of them or none. (Pure.)

An import is validated as a whole before anything is written, and committed in one
transaction under one change id. Rules it does not name stay. A caller that made a dry
run first sends the digest of the rules it saw: if any rule has changed since, the
import is refused, so two concurrent imports never leave a mixture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct, structs

from holdfast.errors import InvalidRule, VersionConflict
from holdfast.limits.rule_changes import Remembered, RuleChange, check_key
from holdfast.limits.rule_json import new_rule, settable
from holdfast.limits.rules import AnyRule, Rule, RuleName, next_digest

RULES_MAX = 10_000
"""Rules per import; a larger file is refused."""
PROBLEMS_TOLD_MAX = 10
"""Mistakes in a file that are listed one by one."""


class RuleImport(Struct, frozen=True):
    """One import. ``expected_digest`` is of the rules it was compared with, or None."""

    rules: tuple[Rule, ...]
    actor: str
    at: str
    change_id: str
    expected_digest: str | None = None
    reason: str = ""
    key: str | None = None
    dry_run: bool = False

    @property
    def fingerprint(self) -> str:
        """Distinguishes a repetition from another request under the same key."""
        said = ("import", self.rules, self.expected_digest, self.reason)
        return hashlib.blake2b(msgspec.json.encode(said), digest_size=16).hexdigest()


class RuleDifference(Struct, frozen=True):
    """What an import changes of one rule: both values by field; none if ``new``."""

    tenantID: str
    resource: str
    new: bool
    changed: Mapping[str, tuple[Any, Any]]


class ImportResult(Struct, frozen=True):
    """What an import did or would do.

    ``digest`` and ``seq`` are those of the rules now: after it, or as a dry run found
    them.
    """

    change_id: str
    digest: str
    seq: int
    created: int
    updated: int
    unchanged: int
    repeated: bool = False


class ImportPlan(Struct, frozen=True):
    """The log entries to write, the differences they make, and the answer."""

    entries: list[RuleChange]
    differences: list[RuleDifference]
    result: ImportResult

    @property
    def made(self) -> list[Rule]:
        return [entry.rule for entry in self.entries if isinstance(entry.rule, Rule)]


class RulesBefore(Struct, frozen=True):
    """What a store has before an import: its log's end, the rules in question."""

    epoch: int
    seq: int
    digest: str
    forgotten_version: int
    rules: list[AnyRule]


def read_rules(bodies: Iterable[Mapping[str, Any]]) -> tuple[Rule, ...]:
    """The rules of a file. InvalidRule lists those that are invalid or appear twice."""
    rules: dict[RuleName, Rule] = {}
    wrong: list[str] = []
    for place, body in enumerate(bodies, 1):
        try:
            rule = new_rule(body)
            if rule.name in rules:
                raise InvalidRule("is in the file twice")
            rules[rule.name] = rule
        except InvalidRule as error:
            wrong.append(
                f"rule {place} ({body.get('tenantID')} {body.get('resource')}): {error.message}"
            )
    if len(rules) + len(wrong) > RULES_MAX:
        wrong = [
            f"at most {RULES_MAX} rules in one import, not {len(rules) + len(wrong)}: split the"
            " file"
        ]
    if wrong:
        more = (
            f"\n… and {len(wrong) - PROBLEMS_TOLD_MAX} more"
            if len(wrong) > PROBLEMS_TOLD_MAX
            else ""
        )
        text = "\n".join(wrong[:PROBLEMS_TOLD_MAX]) + more
        raise InvalidRule(text, fields={"rules": text})
    return tuple(rules.values())


def plan_import(
    wanted: RuleImport, there: RulesBefore, remembered: Remembered | None
) -> ImportPlan | ImportResult:
    """What to write, or the answer given before. Raises KeyReused, VersionConflict."""
    if remembered is not None:
        check_key(remembered, wanted.fingerprint)
        assert remembered.imported is not None
        return structs.replace(msgspec.convert(remembered.imported, ImportResult), repeated=True)
    if wanted.expected_digest not in (None, there.digest):
        raise VersionConflict(
            "the rules have changed since this import was compared with them; nothing was changed:"
            " compare it again",
            digest=there.digest,
            seq=there.seq,
        )
    present = {rule.name: rule for rule in there.rules}
    entries: list[RuleChange] = []
    differences: list[RuleDifference] = []
    digest, seq, created = int(there.digest, 16), there.seq, 0
    for rule in wanted.rules:
        now = present.get(rule.name)
        made = _changed(rule, now, wanted, there)
        if made is None:
            continue
        seq, new = seq + 1, now is None or now.deleted
        created += new
        digest = next_digest(digest, now, made)
        action = "create" if new else "update"
        entries.append(
            RuleChange(seq, action, made, wanted.actor, wanted.reason, wanted.at, wanted.change_id)
        )
        changed = (
            {} if now is None or now.deleted else field_differences(settable(now), settable(made))
        )
        differences.append(RuleDifference(*rule.name, new, changed))
    now_is = (there.digest, there.seq) if wanted.dry_run else (f"{digest:032x}", seq)
    change_id = wanted.change_id if entries and not wanted.dry_run else ""
    counts = (created, len(entries) - created, len(wanted.rules) - len(entries))
    return ImportPlan(entries, differences, ImportResult(change_id, *now_is, *counts))


def _changed(
    rule: Rule, now: AnyRule | None, wanted: RuleImport, there: RulesBefore
) -> Rule | None:
    """The rule in its next version; None if nothing changes."""
    if isinstance(now, Rule) and not now.deleted:
        alike = structs.replace(
            rule,
            epoch=now.epoch,
            version=now.version,
            updated_at=now.updated_at,
            updated_by=now.updated_by,
        )
        if alike == now:
            return None
    version = (now.version if now is not None else there.forgotten_version) + 1
    return structs.replace(
        rule, epoch=there.epoch, version=version, updated_at=wanted.at, updated_by=wanted.actor
    )


def field_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], fields: Iterable[str] | None = None
) -> dict[str, tuple[Any, Any]]:
    """The fields that differ between two states of a rule, with both values."""
    names = fields if fields is not None else sorted(old.keys() | new.keys())
    return {
        name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)
    }
