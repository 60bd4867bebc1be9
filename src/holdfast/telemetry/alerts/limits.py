"""Alerts about limits and access: rules, counters, keys of token issuers. (Pure.)"""

from __future__ import annotations

from holdfast.telemetry.alert import (
    MINUTE,
    Alert,
    Severity,
    above,
    equals,
    risen,
    series,
)
from holdfast.telemetry.expressions import Series

LIMITS = (
    Alert(
        "HoldfastRulesStale",
        Severity.SEV3,
        above(Series("limits_rule_staleness_seconds"), 10),
        "This node does not know whether its rules are the newest.",
        "runbooks/rules-stale.md",
        ("004: rule staleness",),
    ),
    Alert(
        "HoldfastRulesPrimaryDown",
        Severity.SEV2,
        equals(series("dependency_up", dependency="rules"), 0, 30),
        "Rules cannot be changed; those in force stay.",
        "runbooks/rules-primary-down.md",
        ("004: PostgreSQL primary unreachable",),
        explains=("HoldfastRulesStale", "HoldfastAdminDatabaseErrors"),
    ),
    Alert(
        "HoldfastAdminDatabaseErrors",
        Severity.SEV3,
        above(
            risen(
                "admin_errors",
                MINUTE,
                ("operation", "error"),
                (("error", "=", "db_connection_failed"),),
            ),
            5,
        ),
        "Operators' changes of rules fail, because their database does not answer.",
        "runbooks/rules-primary-down.md",
        ("004: Admin API database errors > 5 in 1 minute",),
    ),
    Alert(
        "HoldfastCountersUnavailable",
        Severity.SEV3,
        equals(series("dependency_up", dependency="counters"), 0, 30),
        "Limits are counted by each node alone, with its share.",
        "runbooks/limits-redis.md",
        ("004: Redis unavailable",),
    ),
    Alert(
        "HoldfastIssuerKeysFailing",
        Severity.WARNING,
        above(
            risen("access_jwks_fetches", 10 * MINUTE, ("outcome",), (("outcome", "!=", "ok"),)), 0
        ),
        "The keys of a token issuer cannot be fetched; known keys stay in use.",
        "runbooks/issuer-keys.md",
    ),
)
