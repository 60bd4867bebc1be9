"""What a rule is, which rule answers a check, and how two views of the rules merge.
(Pure.)

A rule is named by (tenant, resource). Tenant ``*`` means every tenant; a resource
ending in ``*`` is a wildcard, and ``*`` alone is the default. The most specific rule
answers:

    exact > longest wildcard > tenant default > the same three of the tenant ``*``

The resources of Holdfast's own entry points begin with a reserved word and a colon
(``send:``). A wildcard matches them only if it includes both: the default of a tenant's
own resources does not decide who may connect.

Every change raises the rule's version. A deletion is a change too and leaves a
tombstone, so the versions of a name never restart. The *epoch* counts the lives of the
primary database: (epoch, version) orders two rules of one name even if a failover lost
a write and its version was used again. A rule is *in force* in the epoch of the
snapshot that contains it, which may be later than its own. So it is newer than every
lost rule, even one with a higher version.

A ``RuleSet`` is immutable. A change makes a new one, and applying it is one pointer
swap: a check ends with the rules it began with, and the next check has the new rules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Literal, NamedTuple

from msgspec import Struct

Algorithm = Literal["token_bucket", "fixed_window", "sliding_window", "concurrency"]
Precision = Literal["strict", "leased"]
OnStoreFailure = Literal["local_share", "open", "closed"]
Mode = Literal["enforce", "shadow", "off"]
DecidedBy = Literal[
    "no_rule", "denial_cache", "lease", "counters", "counted_later", "local_share", "open", "closed"
]

ANY = "*"

RESERVED = ("connect:", "send:", "rest:", "check:", "admin:", "reply:", "replies:", "tokens:")
"""The prefixes of Holdfast's own entry points, including future ones."""

_DIGEST_MODULUS = 1 << 128


def reserved_prefix(resource: str) -> str:
    """The reserved word and colon a resource begins with, or ""."""
    prefix = resource[: resource.find(":") + 1]
    return prefix if prefix in RESERVED else ""


def is_reached(resource: str, by: str) -> bool:
    """Whether a rule for ``by``, a wildcard or a name, can answer for this resource."""
    if not by.endswith(ANY):
        return by == resource
    return resource.startswith(by[:-1]) and len(by) > len(reserved_prefix(resource))


def reserved_beside(wildcard: str) -> list[str]:
    """The reserved words that a wildcard matches as text but does not apply to."""
    if not wildcard.endswith(ANY):
        return []
    return [
        word
        for word in RESERVED
        if word.startswith(wildcard[:-1]) and not is_reached(word, wildcard)
    ]


class RuleName(NamedTuple):
    """Identifies a rule permanently, through deletion and re-creation."""

    tenant: str
    resource: str


class RuleVersion(NamedTuple):
    """Orders the states of one rule: the higher one is newer."""

    epoch: int
    version: int


class Rule(Struct, frozen=True):
    """One version of a rule. ``burst_size`` 0 means the limit; ``deleted`` is a
    tombstone."""

    tenant: str
    resource: str
    algorithm: Algorithm
    limit: int
    window_seconds: float
    burst_size: int = 0
    precision: Precision = "strict"
    on_store_failure: OnStoreFailure = "local_share"
    mode: Mode = "enforce"
    epoch: int = 1
    version: int = 1
    deleted: bool = False
    updated_at: str = ""
    updated_by: str = ""

    @property
    def name(self) -> RuleName:
        return RuleName(self.tenant, self.resource)

    @property
    def stamp(self) -> RuleVersion:
        return RuleVersion(self.epoch, self.version)

    @property
    def capacity(self) -> int:
        """The most that can be used at once; a single cost above it can never be
        admitted."""
        return self.burst_size or self.limit

    @property
    def label(self) -> str:
        """The rule's name in texts and counter keys."""
        return f"{self.tenant}/{self.resource}"


class UnreadableRule(Struct, frozen=True):
    """A rule with values unknown to this version of Holdfast, which cannot apply it.

    Its name and version are known, so it can be shown, replaced and deleted. All other
    fields are as they were written.
    """

    tenant: str = ""
    resource: str = ""
    algorithm: Any = None
    limit: Any = None
    window_seconds: Any = None
    burst_size: Any = 0
    precision: Any = "strict"
    on_store_failure: Any = "local_share"
    mode: Any = "enforce"
    epoch: int = 1
    version: int = 1
    deleted: bool = False
    updated_at: str = ""
    updated_by: str = ""
    why: str = ""

    @property
    def name(self) -> RuleName:
        return RuleName(self.tenant, self.resource)

    @property
    def stamp(self) -> RuleVersion:
        return RuleVersion(self.epoch, self.version)


AnyRule = Rule | UnreadableRule


class Check(NamedTuple):
    """One question: may ``subject`` of ``tenant`` use ``cost`` of ``resource`` now?"""

    tenant: str
    resource: str
    subject: str
    cost: int = 1


class Decision(Struct, frozen=True, gc=False):
    """The answer to one check. Durations are seconds from now.

    ``allowed`` is what to do. ``exceeded`` is what the rule says, which differs in
    shadow mode and if another check of the group refused. ``degraded``: decided without
    the shared counters. ``hold`` is what a concurrency rule granted; return it with
    ``release``. The ``retry_after`` of a concurrency rule is when the first hold ends,
    unless it is released or renewed earlier.
    """

    allowed: bool
    limit: int = 0
    remaining: int = 0
    reset_after: float = 0.0
    retry_after: float = 0.0
    rule: str = ""
    rule_version: int = 0
    decided_by: DecidedBy = "no_rule"
    degraded: bool = False
    exceeded: bool = False
    window_seconds: float = 0.0
    region: str = ""
    hold: str = ""


class RuleSnapshot(Struct, frozen=True):
    """All rules of a database at one moment of its log, tombstones included.

    Not ``whole``: this node cannot read some of them, so a rule missing here may exist
    there. ``store`` identifies the database.
    """

    epoch: int
    seq: int
    rules: tuple[Rule, ...]
    whole: bool = True
    store: str = ""


class _Tenant(NamedTuple):
    exact: dict[str, Rule]
    wildcards: dict[str, Rule]
    lengths: tuple[int, ...]
    default: Rule | None

    def find(self, resource: str) -> Rule | None:
        rule = self.exact.get(resource)
        if rule is not None:
            return rule
        shortest = len(reserved_prefix(resource))
        for length in self.lengths:
            if length < shortest:
                return None
            rule = self.wildcards.get(resource[:length])
            if rule is not None:
                return rule
        return None if shortest else self.default

    def put(self, rules: Iterable[Rule]) -> _Tenant:
        """A copy with these rules added or replaced."""
        exact, wildcards, default = dict(self.exact), dict(self.wildcards), self.default
        for rule in rules:
            if rule.resource == ANY:
                default = None if rule.deleted else rule
            elif rule.resource.endswith(ANY):
                _put(wildcards, rule.resource[:-1], rule)
            else:
                _put(exact, rule.resource, rule)
        lengths = sorted({len(prefix) for prefix in wildcards}, reverse=True)
        return _Tenant(exact, wildcards, tuple(lengths), default)


class RuleSet:
    """An immutable set of rules as one node knows them.

    ``epoch`` and ``store`` are those of the newest full snapshot merged. Merging is
    idempotent and independent of order: after the same final snapshot all nodes hold
    the same set, whatever they saw before, twice or never.
    """

    __slots__ = ("_rules", "_tenants", "digest_value", "epoch", "store")

    def __init__(
        self, rules: Mapping[RuleName, Rule] | None = None, epoch: int = 0, store: str = ""
    ) -> None:
        self.epoch = epoch
        self.store = store
        self.digest_value = 0
        self._rules: dict[RuleName, Rule] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._put(rules or {})

    @classmethod
    def of(cls, rules: Iterable[Rule], epoch: int = 0, store: str = "") -> RuleSet:
        return cls({rule.name: rule for rule in rules}, epoch, store)

    def lookup(self, tenant: str, resource: str) -> Rule | None:
        """The rule that answers for this tenant and resource, or None."""
        for level in (tenant, ANY):
            rules = self._tenants.get(level)
            rule = rules.find(resource) if rules is not None else None
            if rule is not None:
                return rule
        return None

    def in_force(self, rule: Rule) -> RuleVersion:
        """The version counters know this rule by: newer than any rule our snapshot has
        lost."""
        return RuleVersion(max(rule.epoch, self.epoch), rule.version)

    def get(self, name: RuleName) -> Rule | None:
        """The rule of exactly this name, tombstones included."""
        return self._rules.get(name)

    def all(self) -> Iterator[Rule]:
        """Every rule, tombstones included, in no particular order."""
        return iter(self._rules.values())

    def names(self) -> Set[RuleName]:
        """The names of ``all``."""
        return self._rules.keys()

    def live(self) -> list[Rule]:
        return sorted((r for r in self._rules.values() if not r.deleted), key=lambda r: r.name)

    @property
    def digest(self) -> str:
        """Equal digests mean equal rules, whatever order they arrived in."""
        return f"{self.digest_value:032x}"

    def merge(self, *rules: Rule) -> RuleSet:
        """This set with those of ``rules`` that are newer, in one pass.

        A rule of an epoch below our snapshot's is either in that snapshot or was lost
        with the old primary; both ways it is ignored.
        """
        return self._with_newer(rule for rule in rules if rule.epoch >= self.epoch)

    def merge_snapshot(self, snapshot: RuleSnapshot, seen: int | None = None) -> RuleSet:
        """Merge a full snapshot: a newer epoch replaces everything, our own adds what
        is newer.

        So the snapshot of a lagging replica neither reverts nor removes a rule. A
        replacement keeps our rules of its epoch or a later one that are newer than its
        own.

        ``seen`` is the last log position of our epoch that we know anything of. A
        snapshot at or after it knows all we know. A rule it lacks was deleted so long
        ago that the tombstone is forgotten, so it is removed here too.
        """
        if snapshot.epoch > self.epoch:
            kept = (rule for rule in self._rules.values() if rule.epoch >= snapshot.epoch)
            merged = {rule.name: rule for rule in snapshot.rules}
            for rule in kept:
                theirs = merged.get(rule.name)
                if theirs is None or theirs.stamp < rule.stamp:
                    merged[rule.name] = rule
            return RuleSet(merged, snapshot.epoch, snapshot.store)
        if snapshot.epoch < self.epoch:
            return self
        if seen is not None and snapshot.seq >= seen and snapshot.whole:
            return self._replaced(snapshot)
        return self._with_newer(snapshot.rules)

    def _replaced(self, snapshot: RuleSnapshot) -> RuleSet:
        """The snapshot, plus our rules of an epoch it does not know yet."""
        rules = {rule.name: rule for rule in snapshot.rules}
        rules |= {rule.name: rule for rule in self._rules.values() if rule.epoch > snapshot.epoch}
        return self if rules == self._rules else RuleSet(rules, self.epoch, self.store)

    def __len__(self) -> int:
        return len(self._rules)

    def _with_newer(self, rules: Iterable[Rule]) -> RuleSet:
        newer: dict[RuleName, Rule] = {}
        for rule in rules:
            mine = newer.get(rule.name) or self._rules.get(rule.name)
            if mine is None or mine.stamp < rule.stamp:
                newer[rule.name] = rule
        if not newer:
            return self
        new = RuleSet(epoch=self.epoch, store=self.store)
        new.digest_value, new._rules, new._tenants = (
            self.digest_value,
            dict(self._rules),
            dict(self._tenants),
        )
        new._put(newer)
        return new

    def _put(self, rules: Mapping[RuleName, Rule]) -> None:
        """Add these rules while this set is being built."""
        by_tenant: dict[str, list[Rule]] = {}
        for name, rule in rules.items():
            self.digest_value = next_digest(self.digest_value, self._rules.get(name), rule)
            by_tenant.setdefault(rule.tenant, []).append(rule)
        self._rules |= rules
        for tenant, theirs in by_tenant.items():
            self._tenants[tenant] = self._tenants.get(tenant, _NOTHING).put(theirs)


_NOTHING = _Tenant({}, {}, (), None)


def _put(rules: dict[str, Rule], key: str, rule: Rule) -> None:
    if rule.deleted:
        rules.pop(key, None)
    else:
        rules[key] = rule


def fingerprint(rule: AnyRule) -> int:
    """The rule's part of a digest; the same whether or not this version can read the
    rule."""
    text = "\0".join(str(getattr(rule, field)) for field in Rule.__struct_fields__)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest())


def digest_without(digest: str, rule: AnyRule) -> str:
    """The digest after this rule was forgotten."""
    return f"{(int(digest, 16) - fingerprint(rule)) % _DIGEST_MODULUS:032x}"


def next_digest(digest: int, old: AnyRule | None, new: Rule) -> int:
    """The digest after ``new`` replaced ``old``, without reading the other rules."""
    return (digest + fingerprint(new) - (fingerprint(old) if old else 0)) % _DIGEST_MODULUS
