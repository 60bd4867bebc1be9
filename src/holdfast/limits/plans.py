"""A rule made ready for the hot path, for one tenant and resource. (Pure.)"""

from __future__ import annotations

from msgspec import Struct

from holdfast.errors import InvalidCheck
from holdfast.limits.algorithms import Terms, terms_of
from holdfast.limits.counters.contract import key_prefix
from holdfast.limits.form import LIMIT_MAX
from holdfast.limits.rules import Rule, RuleSet

SUBJECT_LENGTH_MAX = 1024


class Plan(Struct, frozen=True, gc=False):
    """What a check needs to know of its rule, worked out once."""

    rule: Rule
    terms: Terms
    prefix: str
    label: str
    lease: int
    holds: bool
    shadow: bool


def plan_of(rules: RuleSet, tenant: str, resource: str, lease_percent: float) -> Plan | None:
    """None where nothing limits: no rule, or one that is off."""
    rule = rules.lookup(tenant, resource)
    if rule is None or rule.mode == "off":
        return None
    holds = rule.algorithm == "concurrency"
    leased = rule.precision == "leased" and not holds
    lease = int(rule.capacity * lease_percent / 100) if leased else 0
    terms = terms_of(rule, rules.in_force(rule), rules.store)
    return Plan(rule, terms, key_prefix(tenant, rule), rule.label, lease, holds, rule.mode == "shadow")


def validate(plan: Plan | None, subject: str, cost: int) -> None:
    """InvalidCheck for what no rule, or not this one, can ever answer."""
    most, whose = (LIMIT_MAX, "any rule") if plan is None else (plan.terms.capacity, plan.label)
    if not 1 <= cost <= most:
        raise InvalidCheck(f"cost must be between 1 and {most}, the capacity of {whose}", field="cost")
    if plan is not None and plan.holds and cost != 1:
        raise InvalidCheck("cost must be 1 for a concurrency rule", field="cost")
    if not subject or len(subject) > SUBJECT_LENGTH_MAX:
        raise InvalidCheck(f"subject must have 1 to {SUBJECT_LENGTH_MAX} characters", field="subject")
