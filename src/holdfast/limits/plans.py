"""Rules made ready for the hot path, each for one tenant. (Pure.)"""

from __future__ import annotations

from typing import TypeVar

from msgspec import Struct

from holdfast.errors import InvalidCheck
from holdfast.limits.algorithms import LimitParams, terms_of
from holdfast.limits.counters.contract import key_prefix
from holdfast.limits.form import LIMIT_MAX, RESOURCE_LENGTH_MAX, TENANT_LENGTH_MAX
from holdfast.limits.rules import Rule, RuleName, RuleSet

SUBJECT_LENGTH_MAX = 1024
PLANS_MAX = 65_536
"""Plans, and names under which they were found, that are remembered; when full they are forgotten and made again."""

K = TypeVar("K")


class CompiledRule(Struct, frozen=True, gc=False):
    """What a check needs to know of its rule, worked out once."""

    rule: Rule
    terms: LimitParams
    prefix: str
    label: str
    lease: int
    holds: bool
    shadow: bool


class RuleCompiler:
    """The plans of one set of rules, by tenant and resource.

    Who asks chooses the text of a resource, so little of it is kept: one plan for each tenant and rule, and under which
    names it was found, of names that a rule could have. What no rule limits, and a name longer than any rule's (a path;
    only wildcards can answer for it), is looked up each time.
    """

    def __init__(self, rules: RuleSet, lease_percent: float) -> None:
        self._rules = rules
        self._lease_percent = lease_percent
        self._of_rules: dict[tuple[str, RuleName], CompiledRule] = {}
        self.found: dict[tuple[str, str], CompiledRule] = {}
        """For who cannot spend the time of a call."""

    def find(self, tenant: str, resource: str) -> CompiledRule | None:
        """None where nothing limits: no rule, or one that is off."""
        plan = self.found.get((tenant, resource))
        if plan is not None:
            return plan
        rule = self._rules.lookup(tenant, resource)
        if rule is None or rule.mode == "off":
            return None
        if len(tenant) > TENANT_LENGTH_MAX:
            return self._made(tenant, rule)
        plan = self._of_rules.get((tenant, rule.name))
        if plan is None:
            plan = self._made(tenant, rule)
            _put(self._of_rules, (tenant, rule.name), plan)
        if len(resource) <= RESOURCE_LENGTH_MAX:
            _put(self.found, (tenant, resource), plan)
        return plan

    def _made(self, tenant: str, rule: Rule) -> CompiledRule:
        holds = rule.algorithm == "concurrency"
        leased = rule.precision == "leased" and not holds
        lease = int(rule.capacity * self._lease_percent / 100) if leased else 0
        terms = terms_of(rule, self._rules.in_force(rule), self._rules.store)
        return CompiledRule(rule, terms, key_prefix(tenant, rule), rule.label, lease, holds, rule.mode == "shadow")


def _put(plans: dict[K, CompiledRule], key: K, plan: CompiledRule) -> None:
    if len(plans) >= PLANS_MAX:
        plans.clear()
    plans[key] = plan


def validate(plan: CompiledRule | None, subject: str, cost: int) -> None:
    """InvalidCheck for what no rule, or not this one, can ever answer."""
    most, whose = (LIMIT_MAX, "any rule") if plan is None else (plan.terms.capacity, plan.label)
    if not 1 <= cost <= most:
        raise InvalidCheck(f"cost must be between 1 and {most}, the capacity of {whose}", field="cost")
    if plan is not None and plan.holds and cost != 1:
        raise InvalidCheck("cost must be 1 for a concurrency rule", field="cost")
    if not subject or len(subject) > SUBJECT_LENGTH_MAX:
        raise InvalidCheck(f"subject must have 1 to {SUBJECT_LENGTH_MAX} characters", field="subject")
