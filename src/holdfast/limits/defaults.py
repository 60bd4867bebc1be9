"""The rules that Holdfast's own doors start with. (Pure.)"""

from __future__ import annotations

from holdfast.limits.lockout import ADMIN
from holdfast.limits.rules import ANY, Precision, Rule


def _rule(resource: str, limit: int, burst: int, precision: Precision = "strict") -> Rule:
    return Rule(ANY, resource, "token_bucket", limit, 60.0, burst_size=burst, precision=precision)


DEFAULT_RULES = (
    _rule("connect:user", 120, 60),
    _rule("connect:address", 600, 600),
    _rule("send:user", 3_000, 500),
    _rule("send:tenant", 600_000, 60_000),
    _rule("rest:user", 1_200, 100),
    _rule("rest:tenant", 60_000, 2_000),
    _rule("check:tenant", 600_000, 60_000, "leased"),  # most questions about limits wait for one round trip, not two
    _rule(ADMIN.resource, 600, 200),
)
"""What each entrance starts with: generous for people, an end for loops. Created once, then the operator's."""
