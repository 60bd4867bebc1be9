"""Checkers 13 and 14: rules are monotone and converge; what is admitted stays within
the limiter's bound. (Pure.)

The nodes record their history (the rules in force, the admitted requests), and the
database its final rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.limits.rules import RuleName, RuleVersion
from holdfast.verify.checkers.verdict import Verdict

_View = Mapping[RuleName, RuleVersion]


class InForce(NamedTuple):
    """The rules of a node from a moment on: epoch, and the version of every rule."""

    node: str
    at: float
    epoch: int
    rules: _View


class AdmittedAmount(NamedTuple):
    """``amount`` admitted for one subject at one moment, on any node."""

    subject: str
    at: float
    amount: int


class Bound(NamedTuple):
    """The most for an interval of ``t`` seconds: ``at_once`` + ``per_second`` × t."""

    at_once: float
    per_second: float


def bound(
    capacity: int, per_second: float, nodes: int = 1, lease: int = 0, outages: bool = False
) -> Bound:
    """capacity + rate × t + nodes × lease; with outages also the local shares.

    While the counters are unavailable each node admits its share; the shares of all
    nodes make one limit (at least 1 per node).
    """
    shares = max(capacity, nodes) if outages else 0
    return Bound(capacity + shares + nodes * lease, per_second * (2 if outages else 1))


@dataclass(slots=True)
class LimitsHistory:
    """``truth``: the database's final rules; ``forgotten``: expired tombstones."""

    in_force: list[InForce] = field(default_factory=list)
    admitted: list[AdmittedAmount] = field(default_factory=list)
    truth: _View = field(default_factory=dict)
    forgotten: set[RuleName] = field(default_factory=set)


def rules_monotone_and_converging(history: LimitsHistory) -> Verdict:
    """Within an epoch no rule of a node goes back or disappears.

    A rule may disappear once the database has forgotten its tombstone. At the end every
    node has the database's rules.
    """
    verdict = Verdict("rules_monotone_and_converging")
    last: dict[str, InForce] = {}
    for now in history.in_force:
        before = last.get(now.node)
        if before is not None:
            _forward(before, now, history.forgotten, verdict)
        last[now.node] = now
    for node, final in sorted(last.items()):
        different = {
            n for n in {*final.rules, *history.truth} if final.rules.get(n) != history.truth.get(n)
        }
        verdict.require(not different, f"{node} ended with other rules: {sorted(different)[:3]}")
    return verdict


def _forward(before: InForce, now: InForce, forgotten: set[RuleName], verdict: Verdict) -> None:
    verdict.require(
        now.epoch >= before.epoch, f"{now.node} went back to epoch {now.epoch}", before, now
    )
    if now.epoch > before.epoch:
        return  # a failover may lose changes: the new primary's rules replace all
    for name, stamp in before.rules.items():
        kept = now.rules.get(name)
        onward = name in forgotten if kept is None else kept >= stamp
        verdict.require(onward, f"{now.node}: {name} went from {stamp} to {kept}")


def admitted_within_bound(history: LimitsHistory, allowed: Bound) -> Verdict:
    """For every subject and every interval: admitted ≤ the bound."""
    verdict = Verdict("admitted_within_bound")
    by_subject: dict[str, list[AdmittedAmount]] = defaultdict(list)
    for each in history.admitted:
        by_subject[each.subject].append(each)
    for subject, admissions in sorted(by_subject.items()):
        most = most_over_rate(sorted(admissions, key=lambda a: a.at), allowed.per_second)
        verdict.require(
            most <= allowed.at_once + 1e-6,
            f"{subject}: {most:.1f} at once, {allowed.at_once} allowed",
        )
    return verdict


def most_over_rate(admissions: Sequence[AdmittedAmount], per_second: float) -> float:
    """The largest admitted amount minus rate × length, over all intervals."""
    most = running = 0.0
    before = admissions[0].at if admissions else 0.0
    for each in admissions:
        running = max(0.0, running - per_second * (each.at - before)) + each.amount
        most = max(most, running)
        before = each.at
    return most
