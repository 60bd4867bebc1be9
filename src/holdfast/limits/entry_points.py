"""The checks that Holdfast's own entry points make.

An entry point passes its name and the caller. The rules decide by user, tenant and
address, each under its own resource (``send:user``, ``send:tenant``, …), so that an
operator can see and change each. The bucket of a single connection belongs to its
session and is not here.

Entry points that cannot wait (a send on a socket, a handshake) get an immediate answer.
It is exact if the counters are in this process. Otherwise it comes from what this node
knows, and the check is counted a moment later. A subject can then exceed its limit by
what it sends within one round trip; that is charged too, so it waits longer afterwards.
So unavailable counters never delay a send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from holdfast.access.network import address_group
from holdfast.errors import RateLimited
from holdfast.limits.entry_rules import (
    ACTIVE,
    ACTIVE_OF_KEY,
    ACTIVE_OF_KEY_DEFAULT,
    ADMIN,
    ADMIN_CALLS_PER_MINUTE_MIN,
)
from holdfast.limits.http import refusal
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import ANY, Check, Decision
from holdfast.message import User
from holdfast.resilience import Buckets

EntryPoint = Literal["connect", "send", "rest", "check", "reply", "tokens", "admin"]

CONNECT_ADDRESS = "connect:address"
CALLERS_MAX = 16_384
"""Recent callers whose checks are cached: they are the same for every send."""


def checks_of(entry_point: EntryPoint, who: User, address: str = "") -> Sequence[Check]:
    """The checks of an entry point. Unknown users, tenants and addresses are left out.

    An address stands for its owner: an IPv6 customer has a whole /64. A handshake
    checks twice: first its address, before the user is known, by the rule of all
    tenants; then its user, and its address by the rule of its tenant.
    """
    if entry_point == "admin":
        return [Check(*ADMIN, who.user_id or address_group(address))]
    checks = []
    if who.user_id and entry_point != "check":  # a service that makes checks acts for many users
        checks.append(Check(who.tenant, f"{entry_point}:user", who.user_id))
    if entry_point == "connect":
        if address:
            checks.append(Check(who.tenant or ANY, CONNECT_ADDRESS, address_group(address)))
    elif who.tenant:
        checks.append(Check(who.tenant, f"{entry_point}:tenant", who.tenant))
    return checks


_cached_checks_of = lru_cache(CALLERS_MAX)(checks_of)
_NOT_CACHED: tuple[EntryPoint, ...] = ("reply", "tokens")
"""A user asks seldom for these, and a cached caller takes 1 KiB."""


class EntryPoints:
    """Makes the checks of entry points and returns decisions or refusals."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._operators = Buckets(ADMIN_CALLS_PER_MINUTE_MIN / 60, ADMIN_CALLS_PER_MINUTE_MIN)
        """For operators whose local share is used up: on many nodes it may be zero."""
        self._known_rules = limiter.rules
        self._has_rule: dict[tuple[EntryPoint, str, bool], bool] = {}
        """What ``has_rule`` found in these rules; at most ``CALLERS_MAX``."""

    async def decide(self, entry_point: EntryPoint, who: User, address: str = "") -> list[Decision]:
        """Exact, all rules or none, for entry points that can wait for the deadline.

        Decisions of rules in shadow mode are left out. While the counters are
        unavailable, an operator has enough calls on each node to undo any change.
        """
        checks = self._checks(entry_point, who, address)
        decisions = self._limiter.visible(checks, await self._limiter.check_many(checks))
        if entry_point == "admin" and any(
            decision.degraded and not decision.allowed for decision in decisions
        ):
            wait = self._operators.take(checks[0].subject, asyncio.get_running_loop().time())
            return decisions if wait else []
        return decisions

    def ask_at_once(
        self, entry_point: EntryPoint, who: User, address: str = ""
    ) -> RateLimited | None:
        """For entry points that cannot wait."""
        return self.admit_at_once(entry_point, who, 1, address)[1]

    def admit_at_once(
        self, entry_point: EntryPoint, who: User, count: int, address: str = ""
    ) -> tuple[int, RateLimited | None]:
        """``ask_at_once`` for ``count`` requests: how many pass, the others' error."""
        checks = self._checks(entry_point, who, address)
        admitted, decision = self._limiter.admit(checks, count)
        return admitted, refusal([decision]) if decision is not None else None

    def has_rule(self, entry_point: EntryPoint, who: User) -> bool:
        """Whether any rule decides here; asking without one costs more than looking."""
        rules = self._limiter.rules
        if rules is not self._known_rules or len(self._has_rule) >= CALLERS_MAX:
            self._known_rules, self._has_rule = rules, {}
        key = (entry_point, who.tenant, bool(who.user_id))
        if key not in self._has_rule:
            checks = checks_of(entry_point, who)
            self._has_rule[key] = any(rules.lookup(each.tenant, each.resource) for each in checks)
        return self._has_rule[key]

    def charge(self, entry_point: EntryPoint, who: User, amount: int) -> None:
        """Count what was used without asking; see ``Limiter.charge``."""
        for check in checks_of(entry_point, who):
            self._limiter.charge(check.tenant, check.resource, check.subject, amount)

    def active_limit(self, tenant: str, per_user: int, *, is_key: bool = False) -> int:
        """How many replies one user of a tenant, or a key that names no user, may have
        active now: the live rule's limit; if no rule is enforced, ``per_user`` or the
        key's default.
        """
        rule = self._limiter.rules.lookup(tenant, ACTIVE_OF_KEY if is_key else ACTIVE)
        if rule is not None and rule.mode == "enforce":
            return rule.limit
        return ACTIVE_OF_KEY_DEFAULT if is_key else per_user

    def _checks(self, entry_point: EntryPoint, who: User, address: str) -> Sequence[Check]:
        """Leave out the address of a known user, which was charged before it was known.

        It is checked again only if the tenant has its own rule for addresses.
        """
        make = checks_of if entry_point in _NOT_CACHED else _cached_checks_of
        checks = make(entry_point, who, address)
        if (
            entry_point != "connect"
            or not who.tenant
            or self._limiter.has_own_rule(who.tenant, CONNECT_ADDRESS)
        ):
            return checks
        return [check for check in checks if check.resource != CONNECT_ADDRESS]
