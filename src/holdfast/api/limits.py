"""Endpoints of limits: rules for operators, checks for other services."""

from __future__ import annotations

import base64
from collections.abc import Awaitable

from holdfast.api.admin import record
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call
from holdfast.api.limit_schemas import (
    ChangesPage,
    ChangesQuery,
    ChargeBody,
    Charged,
    CheckBody,
    CheckManyBody,
    DecisionList,
    DeleteQuery,
    HistoryEntry,
    HistoryPage,
    HistoryQuery,
    HoldBody,
    ImportAnswer,
    ImportBody,
    Released,
    ResetBody,
    RulePage,
    RulesQuery,
    SubjectQuery,
)
from holdfast.errors import (
    InvalidCheck,
    InvalidMessage,
    InvalidRule,
    NotFound,
    Refused,
    VersionConflict,
)
from holdfast.limits.admin import ImportRequest
from holdfast.limits.entry_points import checks_of
from holdfast.limits.http import refusal
from holdfast.limits.limiter.decisions import Standing
from holdfast.limits.rule_changes import RuleChange, RuleChangeResult
from holdfast.limits.rule_json import name_of, refuse, render
from holdfast.limits.rules import ANY, Check, RuleName
from holdfast.wire.frames import Error


def invalid_check(wrong: InvalidMessage) -> Refused:
    """An invalid field is 422; an error that names no field stays as it is."""
    return InvalidCheck(wrong.message, **wrong.details) if "field" in wrong.details else wrong


def invalid_rule(wrong: InvalidMessage) -> Refused:
    """The same for rules, whose errors list several fields."""
    field = wrong.details.get("field")
    return (
        InvalidRule(wrong.message, fields={field: wrong.message.removeprefix(f"{field} ")})
        if field
        else wrong
    )


async def _changed(
    deps: ApiDeps, call: Call, doing: Awaitable[RuleChangeResult], status: int = 200
) -> Answer:
    """The rule after a change. After the deadline the outcome is unknown; a retry with
    the same key finds out."""
    try:
        changed = await call.done_in_time(doing)
    except VersionConflict as error:
        return _conflict(error)
    headers = {"Idempotency-Replayed": "true"} if changed.repeated else {}
    return Answer(render(changed.rule), status, headers)


def _conflict(error: VersionConflict) -> Answer:
    """Adds the design document's shape to ours: current version and rule at the top."""
    detail = Error(
        error.code, error.message, retryable=False, outcome="rejected", details=error.details
    )
    body = {
        "error": detail,
        "currentVersion": error.details["currentVersion"],
        "rule": error.details["rule"],
    }
    return Answer(body, 409)


async def create_rule(deps: ApiDeps, call: Call) -> Answer:
    return await _changed(
        deps, call, deps.limits.control.create(call.body, call.principal.user_id, call.key), 201
    )


async def update_rule(deps: ApiDeps, call: Call) -> Answer:
    return await _changed(
        deps, call, deps.limits.control.update(call.body, call.principal.user_id, call.key)
    )


async def delete_rule(deps: ApiDeps, call: Call) -> Answer:
    query: DeleteQuery = call.query
    body = {name: getattr(query, name) for name in query.__struct_fields__}
    return await _changed(
        deps, call, deps.limits.control.delete(body, call.principal.user_id, call.key)
    )


async def roll_back_rule(deps: ApiDeps, call: Call) -> Answer:
    return await _changed(
        deps, call, deps.limits.control.roll_back(call.body, call.principal.user_id, call.key)
    )


async def import_rules(deps: ApiDeps, call: Call) -> Answer:
    """Import in one transaction. After the deadline the outcome is unknown; a retry
    with the same key finds out."""
    body: ImportBody = call.body
    request = ImportRequest(body.dryRun, body.expectedDigest, body.reason)
    doing = deps.limits.control.import_rules(body.rules, call.principal.user_id, request, call.key)
    result, differences = await call.done_in_time(doing)
    counts = (result.created, result.updated, result.unchanged)
    changes = differences if body.dryRun else None
    headers = {"Idempotency-Replayed": "true"} if result.repeated else {}
    return Answer(
        ImportAnswer(result.change_id, result.digest, result.seq, *counts, changes), headers=headers
    )


async def read_rules(deps: ApiDeps, call: Call) -> Answer:
    query: RulesQuery = call.query
    control = deps.limits.control
    if query.resource is not None:
        if query.after is not None:
            refuse({"after": "has no meaning where one rule is asked for"})
        name = name_of({"tenantID": query.tenantID, "resource": query.resource})
        return Answer(render(await call.in_time(control.get(name))))
    rules = await call.in_time(
        control.page(query.tenantID, _name_of_token(query.after), query.limit + 1)
    )
    shown = rules[: query.limit]
    more = len(rules) > query.limit
    return Answer(
        RulePage([render(rule) for rule in shown], _page_token(shown[-1].name) if more else None)
    )


def _page_token(name: RuleName) -> str:
    """The end of a page, in characters safe in a URL. No name contains a space."""
    return base64.urlsafe_b64encode(" ".join(name).encode()).decode().rstrip("=")


def _name_of_token(after: str | None) -> RuleName | None:
    if after is None:
        return None
    try:
        tenant, resource = base64.urlsafe_b64decode(after + "==").decode().split(" ")
        return name_of({"tenantID": tenant, "resource": resource})
    except (ValueError, InvalidRule):
        why = "must be the next of the page before"
        raise InvalidRule(f"after {why}", fields={"after": why}) from None


async def read_rule_history(deps: ApiDeps, call: Call) -> Answer:
    query: HistoryQuery = call.query
    name = name_of({"tenantID": query.tenantID, "resource": query.resource})
    changes = await call.in_time(deps.limits.control.history(name, query.before, query.limit))
    return Answer(HistoryPage([_entry(change) for change in changes]))


def _entry(change: RuleChange) -> HistoryEntry:
    return HistoryEntry(
        seq=change.seq,
        version=change.rule.version,
        action=change.action,
        actor=change.actor,
        reason=change.reason,
        at=change.at,
        rule=render(change.rule),
        changeID=change.change_id,
    )


async def read_rule_changes(deps: ApiDeps, call: Call) -> Answer:
    query: ChangesQuery = call.query
    head, changes = await call.in_time(deps.limits.control.changes(query.after, query.limit))
    return Answer(ChangesPage([_entry(change) for change in changes], head))


async def get_admin_health(deps: ApiDeps, call: Call) -> Answer:
    """Asks the primary at most once a second; only operators get details."""
    health = await deps.admin_health.ask(deps.limits.health, deps.clock.monotonic())
    shown = health if "status:read" in call.principal.scopes else {"status": health["status"]}
    return Answer(shown, 200 if health["status"] == "healthy" else 503)


async def get_limits_status(deps: ApiDeps, call: Call) -> Answer:
    return Answer(deps.limits.status())


async def peek_limit(deps: ApiDeps, call: Call) -> Answer:
    return Answer(await _standing(deps, call, call.query))


async def reset_limit(deps: ApiDeps, call: Call) -> Answer:
    """Recorded first."""
    body: ResetBody = call.body
    await _standing(deps, call, body)
    target = f"{body.tenantID}/{body.resource}/{body.subject}"
    await record(
        deps,
        call,
        "limit.reset",
        target,
        body.reason,
        body.tenantID if body.tenantID != ANY else "",
    )
    await call.done_in_time(
        deps.limits.limiter.reset(Check(body.tenantID, body.resource, body.subject))
    )
    return Answer(await _standing(deps, call, body))


async def _standing(deps: ApiDeps, call: Call, asked: SubjectQuery) -> Standing:
    check = Check(asked.tenantID, asked.resource, asked.subject)
    standing = await call.in_time(deps.limits.limiter.peek(check))
    if standing is None:
        raise NotFound("no rule limits this resource of this tenant")
    return standing


async def check_limit(deps: ApiDeps, call: Call) -> Answer:
    """Always 200: a refusal is the answer to the check, not an error."""
    body: CheckBody = call.body
    tenant = call.principal.tenant
    return Answer(await deps.limits.limiter.check(tenant, body.resource, body.subject, body.cost))


async def _charge_more(deps: ApiDeps, call: Call, count: int) -> None:
    """Charge a call for all its checks but the first, charged before the body was
    read."""
    checks = (
        [check._replace(cost=count) for check in checks_of("check", call.principal.user)]
        if count
        else ()
    )
    try:
        decisions = [await deps.limits.limiter.check(*check) for check in checks]
    except InvalidCheck as error:
        text = (
            f"{count + 1} checks in one call are more than check:tenant ever allows at once: ask"
            " fewer"
        )
        raise InvalidCheck(text, field="checks") from error
    if refused := refusal(decisions):
        raise refused


async def check_limits(deps: ApiDeps, call: Call) -> Answer:
    body: CheckManyBody = call.body
    await _charge_more(deps, call, len(body.checks) - 1)
    checks = [Check(call.principal.tenant, c.resource, c.subject, c.cost) for c in body.checks]
    decisions = await deps.limits.limiter.check_many(checks)
    return Answer(DecisionList(all(decision.allowed for decision in decisions), decisions))


async def charge_limit(deps: ApiDeps, call: Call) -> Answer:
    body: ChargeBody = call.body
    tenant = call.principal.tenant
    charged = deps.limits.limiter.charge(tenant, body.resource, body.subject, body.amount)
    return Answer(Charged(charged))


async def renew_limit(deps: ApiDeps, call: Call) -> Answer:
    body: HoldBody = call.body
    return Answer(
        await deps.limits.limiter.renew(
            Check(call.principal.tenant, body.resource, body.subject), body.hold
        )
    )


async def release_limit(deps: ApiDeps, call: Call) -> Answer:
    body: HoldBody = call.body
    check = Check(call.principal.tenant, body.resource, body.subject)
    return Answer(Released(await call.in_time(deps.limits.limiter.release(check, body.hold))))
