"""What a rule is, which rule answers a check, and how two views of the rules become one. (Pure.)

A rule is named by (tenant, resource). ``*`` as tenant means every tenant; a resource that ends in ``*`` is a
wildcard, and ``*`` alone is the default. The most specific rule answers:

    exact > longest wildcard > tenant default > the same three of the tenant ``*``

Every change of a rule raises its version, and a deletion is a change too (a tombstone), so versions of a name
never restart. An *epoch* counts the lives of the primary database: (epoch, version) orders two rules of one
name even when a failover lost a write and its version was given out again.

A ``RuleSet`` is immutable. A change makes a new one, and putting it in place is one pointer swap: a check ends
with the rules it began with, and the next one has the new rules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from msgspec import Struct, structs

Algorithm = Literal["token_bucket", "fixed_window", "sliding_window", "concurrency"]
Precision = Literal["strict", "leased"]
OnStoreFailure = Literal["local_share", "open", "closed"]
Mode = Literal["enforce", "shadow", "off"]
DecidedBy = Literal["no_rule", "denial_cache", "lease", "counters", "counted_later", "local_share", "open", "closed"]

ANY = "*"

_DIGEST_MODULUS = 1 << 128


class RuleName(NamedTuple):
    """Names a rule for ever, through deletion and creation."""

    tenant: str
    resource: str


class Stamp(NamedTuple):
    """Orders the states of one rule: the newer stamp wins."""

    epoch: int
    version: int


class Rule(Struct, frozen=True):
    """One rule in one version. ``burst_size`` 0 means the limit; a ``deleted`` rule is a tombstone."""

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
    def stamp(self) -> Stamp:
        return Stamp(self.epoch, self.version)

    @property
    def capacity(self) -> int:
        """The most that can be used at once; a single cost above it can never be admitted."""
        return self.burst_size or self.limit

    @property
    def label(self) -> str:
        """The rule as people and counter keys call it."""
        return f"{self.tenant}/{self.resource}"

    def scaled(self, numerator: int, denominator: int) -> Rule:
        """The same rule for a part (or a multiple) of the limit; never below 1, so it never stops everybody."""
        burst = max(1, self.burst_size * numerator // denominator) if self.burst_size else 0
        return structs.replace(self, limit=max(1, self.limit * numerator // denominator), burst_size=burst)


class Check(NamedTuple):
    """One question: may ``subject`` of ``tenant`` use ``cost`` of ``resource`` now?"""

    tenant: str
    resource: str
    subject: str
    cost: int = 1


class Decision(Struct, frozen=True, gc=False):
    """The answer to one check. Durations are seconds from now.

    ``allowed`` is what to do; ``exceeded`` is what the rule says, which differs in shadow mode and when another
    check of the same group refused. ``degraded``: decided without the shared counters. ``hold`` names what a
    concurrency rule granted; give it back with ``release``.
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


class Snapshot(Struct, frozen=True):
    """All rules as a database had them at one moment of its log, tombstones included.

    Not ``whole``: there are rules in it that this node cannot read; what is missing here need not be missing there.
    """

    epoch: int
    seq: int
    rules: tuple[Rule, ...]
    whole: bool = True


class _Tenant(NamedTuple):
    exact: dict[str, Rule]
    wildcards: dict[str, Rule]
    lengths: tuple[int, ...]
    default: Rule | None

    def find(self, resource: str) -> Rule | None:
        rule = self.exact.get(resource)
        if rule is not None:
            return rule
        for length in self.lengths:
            rule = self.wildcards.get(resource[:length])
            if rule is not None:
                return rule
        return self.default

    def put(self, rule: Rule) -> _Tenant:
        """With this rule in its place; the others are not looked at."""
        if rule.resource == ANY:
            return self._replace(default=None if rule.deleted else rule)
        if rule.resource.endswith(ANY):
            wildcards = _put(self.wildcards, rule.resource[:-1], rule)
            return self._replace(wildcards=wildcards, lengths=_lengths(wildcards))
        return self._replace(exact=_put(self.exact, rule.resource, rule))


class RuleSet:
    """An immutable set of rules in the view of one node.

    ``epoch`` is that of the newest full snapshot inside. Merging is idempotent and does not depend on order:
    after the same final snapshot every node holds the same set, whatever it saw before, twice, or never.
    """

    __slots__ = ("_rules", "_tenants", "digest_value", "epoch")

    def __init__(self, rules: Mapping[RuleName, Rule] | None = None, epoch: int = 0) -> None:
        self._rules: dict[RuleName, Rule] = dict(rules or {})
        self.epoch = epoch
        self.digest_value = sum(map(fingerprint, self._rules.values())) % _DIGEST_MODULUS
        by_tenant: dict[str, list[Rule]] = {}
        for rule in self._rules.values():
            by_tenant.setdefault(rule.tenant, []).append(rule)
        self._tenants = {tenant: _arrange(rules) for tenant, rules in by_tenant.items()}

    @classmethod
    def of(cls, rules: Iterable[Rule], epoch: int = 0) -> RuleSet:
        return cls({rule.name: rule for rule in rules}, epoch)

    def lookup(self, tenant: str, resource: str) -> Rule | None:
        """The rule that answers for this tenant and resource, or None."""
        for level in (tenant, ANY):
            rules = self._tenants.get(level)
            rule = rules.find(resource) if rules is not None else None
            if rule is not None:
                return rule
        return None

    def get(self, name: RuleName) -> Rule | None:
        """The rule of exactly this name, tombstones included."""
        return self._rules.get(name)

    def all(self) -> Iterator[Rule]:
        """Every rule, tombstones included, in no order."""
        return iter(self._rules.values())

    def live(self) -> list[Rule]:
        return sorted((r for r in self._rules.values() if not r.deleted), key=lambda r: r.name)

    @property
    def digest(self) -> str:
        """Equal digests mean equal rules; it does not depend on the order in which they came."""
        return f"{self.digest_value:032x}"

    def merge(self, rule: Rule) -> RuleSet:
        """With this rule if it is newer than ours.

        A rule of an epoch below our snapshot's is either in that snapshot already or was lost with the old
        primary, and is ignored either way.
        """
        return self._with(rule) if rule.epoch >= self.epoch and self._is_newer(rule) else self

    def merge_snapshot(self, snapshot: Snapshot, seen: int | None = None) -> RuleSet:
        """With a full snapshot: of a newer epoch it replaces everything, of ours it adds what is newer.

        A lagging replica's snapshot can therefore neither take a rule back nor remove one. What replaces us
        does not undo rules of its own or a later epoch that we already have in a newer version.

        ``seen`` is the last place in the log of our epoch from which we have anything. A snapshot that is not
        before it knows all we know, and what it does not have was deleted so long ago that its tombstone is
        forgotten: it is removed here too.
        """
        if snapshot.epoch > self.epoch:
            kept = (rule for rule in self._rules.values() if rule.epoch >= snapshot.epoch)
            merged = {rule.name: rule for rule in snapshot.rules}
            for rule in kept:
                theirs = merged.get(rule.name)
                if theirs is None or theirs.stamp < rule.stamp:
                    merged[rule.name] = rule
            return RuleSet(merged, snapshot.epoch)
        if snapshot.epoch < self.epoch:
            return self
        if seen is not None and snapshot.seq >= seen and snapshot.whole:
            return self._replaced(snapshot)
        changed = {rule.name: rule for rule in snapshot.rules if self._is_newer(rule)}
        return RuleSet({**self._rules, **changed}, self.epoch) if changed else self

    def _replaced(self, snapshot: Snapshot) -> RuleSet:
        """The snapshot, and what we heard of an epoch that it does not know yet."""
        rules = {rule.name: rule for rule in snapshot.rules}
        rules |= {rule.name: rule for rule in self._rules.values() if rule.epoch > snapshot.epoch}
        return self if rules == self._rules else RuleSet(rules, self.epoch)

    def __len__(self) -> int:
        return len(self._rules)

    def _is_newer(self, rule: Rule) -> bool:
        mine = self._rules.get(rule.name)
        return mine is None or mine.stamp < rule.stamp

    def _with(self, rule: Rule) -> RuleSet:
        new = RuleSet.__new__(RuleSet)
        new.epoch = self.epoch
        new._rules = {**self._rules, rule.name: rule}
        new.digest_value = next_digest(self.digest_value, self._rules.get(rule.name), rule)
        theirs = self._tenants.get(rule.tenant)
        new._tenants = {**self._tenants, rule.tenant: theirs.put(rule) if theirs else _arrange([rule])}
        return new


def _arrange(rules: list[Rule]) -> _Tenant:
    rules = [rule for rule in rules if not rule.deleted]
    exact = {r.resource: r for r in rules if not r.resource.endswith(ANY)}
    wildcards = {r.resource[:-1]: r for r in rules if r.resource.endswith(ANY) and r.resource != ANY}
    return _Tenant(exact, wildcards, _lengths(wildcards), next((r for r in rules if r.resource == ANY), None))


def _lengths(wildcards: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({len(prefix) for prefix in wildcards}, reverse=True))


def _put(rules: dict[str, Rule], key: str, rule: Rule) -> dict[str, Rule]:
    changed = {**rules, key: rule}
    if rule.deleted:
        del changed[key]
    return changed


def fingerprint(rule: Rule) -> int:
    """The rule's share of a digest."""
    text = "\0".join(str(value) for value in structs.astuple(rule))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest())


def digest_without(digest: str, rule: Rule) -> str:
    """The digest after this rule was forgotten."""
    return f"{(int(digest, 16) - fingerprint(rule)) % _DIGEST_MODULUS:032x}"


def next_digest(digest: int, old: Rule | None, new: Rule) -> int:
    """The digest after ``new`` took the place of ``old``, without reading the other rules."""
    return (digest + fingerprint(new) - (fingerprint(old) if old else 0)) % _DIGEST_MODULUS
