"""The requests of the rules commands, and short texts for a rule."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.cli.rest import RestClient
from holdfast.errors import NotFound, OutcomeUnknown, RateLimited, VersionConflict

PAGE = 500
PATIENCE_SECONDS = 60.0
"""The longest ``Retry-After`` to wait for; a longer one is reported as the error."""


def every(rest: RestClient, tenant: str | None, page_size: int = PAGE) -> list[dict[str, Any]]:
    """The rules of one tenant or of all, page by page."""
    found: list[dict[str, Any]] = []
    after = None
    while True:
        page = patiently(rest.get, "/admin/rules", tenantID=tenant, after=after, limit=page_size)
        found += page["rules"]
        after = page["next"]
        if after is None:
            return found


def history_of(
    rest: RestClient, tenant: str, resource: str, page_size: int = PAGE
) -> list[dict[str, Any]]:
    """A rule's changes, newest first, as far as the log reaches back."""
    found: list[dict[str, Any]] = []
    before = None
    while True:
        name = {"tenantID": tenant, "resource": resource}
        page = patiently(rest.get, "/admin/rules/history", **name, before=before, limit=page_size)[
            "changes"
        ]
        found += page
        if len(page) < page_size or page[-1]["version"] == 1:
            return found
        before = page[-1]["version"]


def put(rest: RestClient, body: Mapping[str, Any], version: int | None) -> Any:
    """Create the rule, or change the version that was seen."""
    if version is None:
        try:
            there = rest.get("/admin/rules", tenantID=body["tenantID"], resource=body["resource"])
        except NotFound:
            return sure(rest, "POST", "/admin/rules", body)
        version = there["version"]
    return sure(rest, "PUT", "/admin/rules", {**body, "expectedVersion": version})


def sure(rest: RestClient, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send with an idempotency key; after an unknown outcome repeat with the same key.

    The error of a conflict is extended by the current rule.
    """
    headers = {"Idempotency-Key": secrets.token_hex(16)}
    try:
        try:
            return rest.ask(method, path, body, headers)
        except OutcomeUnknown:
            return patiently(rest.ask, method, path, body, headers)
    except VersionConflict as error:
        if now := error.details.get("rule"):
            current = ", ".join(filter(None, (now["algorithm"], amount(now), besides(now))))
            error.message += f"; it is version {now['version']} now: {current}"
        raise


def compared(rest: RestClient, rules: Sequence[Mapping[str, Any]]) -> Any:
    """What an import of these rules would change, and the digest it is based on."""
    return patiently(rest.post, "/admin/rules/import", body={"rules": rules, "dryRun": True})


def imported(rest: RestClient, rules: Sequence[Mapping[str, Any]], digest: str, reason: str) -> Any:
    """Make the import, unless something has changed since the comparison."""
    body = {"rules": rules, "expectedDigest": digest, "reason": reason}
    return patiently(sure, rest, "POST", "/admin/rules/import", body)


def patiently(ask: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Retry when rate limited, so that commands of many calls do not fail."""
    while True:
        try:
            return ask(*given, **named)
        except RateLimited as error:
            wait = error.retry_after_seconds or 1.0
            if wait > PATIENCE_SECONDS:
                raise
            time.sleep(wait)


def amount(rule: Mapping[str, Any]) -> str:
    return f"{rule['limit']}/{rule['window']}"


def besides(rule: Mapping[str, Any]) -> str:
    """The settings that are not the default."""
    usual = {"precision": "strict", "onStoreFailure": "local_share", "mode": "enforce"}
    said = [rule[field] for field, default in usual.items() if rule[field] != default]
    return ", ".join(["unreadable"] * ("unreadable" in rule) + said + ["deleted"] * rule["deleted"])
