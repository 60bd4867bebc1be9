"""Endpoints of limits: rules for operators, checks for other services.

Rule bodies have the field names of the rules' own JSON form.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from holdfast.api.admin import record
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call
from holdfast.api.schemas import RequestBody, _Reason
from holdfast.bounds import MIB
from holdfast.errors import (
    InvalidCheck,
    InvalidMessage,
    InvalidRule,
    NotFound,
    Refused,
    VersionConflict,
)
from holdfast.limits.admin import REASON_LENGTH_MAX, VERSION_MAX, ImportRequest
from holdfast.limits.counters.contract import KEYS_PER_CALL_MAX
from holdfast.limits.entry_points import checks_of
from holdfast.limits.http import refusal
from holdfast.limits.limiter.decisions import SUBJECT_LENGTH_MAX, Standing
from holdfast.limits.rule_changes import RuleChange, RuleChangeResult
from holdfast.limits.rule_import import RULES_MAX, RuleDifference
from holdfast.limits.rule_json import (
    CHOICES,
    LIMIT_MAX,
    REQUIRED,
    RESOURCE_LENGTH_MAX,
    TENANT_LENGTH_MAX,
    WINDOW_PATTERN,
    name_of,
    refuse,
    render,
)
from holdfast.limits.rules import ANY, Check, Decision, RuleName
from holdfast.message import ID_BYTES_MAX
from holdfast.wire.frames import Error

_VERSION = {"type": "integer", "minimum": 1, "maximum": VERSION_MAX}
_RULE = {
    "tenantID": {"type": "string", "minLength": 1, "maxLength": TENANT_LENGTH_MAX, "pattern": r"^(\*|[!-)+-z|~]+)$"},
    "resource": {"type": "string", "minLength": 1, "maxLength": RESOURCE_LENGTH_MAX, "pattern": r"^[!-)+-~]*\*?$"},
    "algorithm": {"enum": CHOICES["algorithm"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX},
    "window": {"type": "string", "pattern": f"^{WINDOW_PATTERN}$", "description": "from 100ms to 366d"},
    "burstSize": {
        "type": ["integer", "null"], "minimum": 1, "maximum": LIMIT_MAX,
        "description": "token_bucket only; null unsets it, and so does another algorithm",
    },
    "precision": {"enum": CHOICES["precision"]},
    "onStoreFailure": {"enum": CHOICES["onStoreFailure"]},
    "mode": {"enum": CHOICES["mode"]},
}  # fmt: skip
_SAID = {
    "reason": {"type": "string", "maxLength": REASON_LENGTH_MAX},
    "idempotencyKey": {
        "type": ["string", "null"],
        "minLength": 1,
        "maxLength": ID_BYTES_MAX,
        "pattern": "^[!-~]+$",
    },
}
_SEEN = {"expectedVersion": _VERSION}
_NAME = {name: _RULE[name] for name in ("tenantID", "resource")}
_KEPT = {
    "version": _VERSION, "epoch": {"type": "integer"}, "deleted": {"type": "boolean"},
    "updatedAt": {"type": "string"}, "updatedBy": {"type": "string"},
}  # fmt: skip


def _described(required: Iterable[str], *properties: Mapping[str, Any]) -> Meta:
    """The schema of a rule body, for OpenAPI only: ``limits.rule_json`` and
    ``limits.admin`` validate it."""
    fields = {name: schema for part in properties for name, schema in part.items()}
    return Meta(
        extra_json_schema={
            "properties": fields,
            "required": [*required],
            "additionalProperties": False,
        }
    )


def _answered() -> Meta:
    """The schema of a rule in an answer; an unreadable rule is shown as stored."""
    told = {
        "unreadable": {
            "type": "string",
            "description": "why this version cannot apply it, and what to do",
        }
    }
    fields = {**{name: {} for name in _RULE}, **_NAME, **_KEPT, **told}
    shape = _described((*REQUIRED, *_KEPT), fields).extra_json_schema or {}
    readable = {"if": {"not": {"required": [*told]}}, "then": {"properties": _RULE}}
    return Meta(extra_json_schema={**shape, **readable})


RuleBody = Annotated[Mapping[str, Any], _answered()]
NewRule = Annotated[Mapping[str, Any], _described(REQUIRED, _RULE, _SAID)]
RuleUpdate = Annotated[Mapping[str, Any], _described((*_NAME, *_SEEN), _RULE, _SEEN, _SAID)]
Rollback = Annotated[
    Mapping[str, Any], _described((*_NAME, "version"), _NAME, {"version": _VERSION}, _SEEN, _SAID)
]
_Subject = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": SUBJECT_LENGTH_MAX})]
Amount = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": LIMIT_MAX})]
"""For OpenAPI only; the limiter validates: 422 with the field and the reason."""
_Place = Annotated[
    str, Meta(min_length=1, max_length=(TENANT_LENGTH_MAX + 1 + RESOURCE_LENGTH_MAX) * 4 // 3)
]
"""Enough for the longest names."""


IMPORT_BYTES_MAX = 8 * MIB
"""Enough for the longest import of ``rule_import.RULES_MAX`` rules."""
IMPORT_SECONDS_MAX = 25.0
"""The deadline of an import; the command line waits for 30 s."""
Rules = Annotated[
    Raw,
    Meta(
        extra_json_schema={
            "type": "array",
            "maxItems": RULES_MAX,
            "items": {"type": "object", **(_described(REQUIRED, _RULE).extra_json_schema or {})},
        }
    ),
]
"""Read in a thread, by ``limits.rule_import``."""


class ImportBody(RequestBody, frozen=True):
    """Rules to create or change, all or none; what is not named stays."""

    rules: Rules
    dryRun: bool = False
    expectedDigest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")] | None = None
    reason: Annotated[str, Meta(max_length=REASON_LENGTH_MAX)] = ""


class ImportAnswer(Struct, frozen=True):
    """``digest`` and ``seq`` are of the rules now; ``changes`` are told by a dry run,
    which has no ``changeID``.
    """

    changeID: str
    digest: str
    seq: int
    created: int
    updated: int
    unchanged: int
    changes: Sequence[RuleDifference] | None = None


class RulePage(Struct, frozen=True):
    rules: Sequence[RuleBody]
    next: str | None = None


RULES_PER_PAGE_MAX = 500
PerPage = Annotated[int, Meta(ge=1, le=RULES_PER_PAGE_MAX)]
Version = Annotated[int, Meta(ge=1, le=VERSION_MAX)]
Resource = Annotated[str, Meta(min_length=1, max_length=RESOURCE_LENGTH_MAX)]


class RulesQuery(RequestBody, frozen=True):
    """One rule if both names are given, else a page; ``after`` is the ``next`` of the
    page before.
    """

    tenantID: str | None = None
    resource: str | None = None
    after: _Place | None = None
    limit: PerPage = 100


class HistoryQuery(RequestBody, frozen=True):
    """Newest first; ``before`` is a version."""

    tenantID: str
    resource: str
    before: Version | None = None
    limit: PerPage = 100


class ChangesQuery(RequestBody, frozen=True):
    """Oldest first; ``after`` is the ``seq`` of the last change one has."""

    after: Annotated[int, Meta(ge=0, le=VERSION_MAX)] = 0
    limit: PerPage = 100


class DeleteQuery(RequestBody, frozen=True):
    tenantID: str
    resource: str
    expectedVersion: Version
    reason: Annotated[str, Meta(max_length=REASON_LENGTH_MAX)] = ""


class CheckBody(RequestBody, frozen=True):
    """May ``subject`` use ``cost`` of ``resource`` now? The tenant is the credential's."""

    resource: Resource
    subject: _Subject
    cost: Amount = 1


class SubjectQuery(RequestBody, frozen=True):
    """One subject of a resource, as checks name it; its rule may be the tenant's or
    that of all tenants.
    """

    tenantID: Annotated[str, Meta(min_length=1, max_length=TENANT_LENGTH_MAX)]
    resource: Resource
    subject: Annotated[str, Meta(min_length=1, max_length=SUBJECT_LENGTH_MAX)]


class ResetBody(SubjectQuery, frozen=True):
    """``reason`` goes into the audit log."""

    reason: _Reason


class CheckManyBody(RequestBody, frozen=True):
    """All are admitted and counted, or none."""

    checks: Annotated[list[CheckBody], Meta(min_length=1, max_length=KEYS_PER_CALL_MAX)]


class HoldBody(RequestBody, frozen=True):
    """The ``hold`` of a decision by a concurrency rule, and what it was asked for."""

    resource: Resource
    subject: Annotated[str, Meta(min_length=1, max_length=SUBJECT_LENGTH_MAX)]
    hold: Annotated[str, Meta(min_length=1, max_length=64)]


class Released(Struct, frozen=True):
    released: bool


class DecisionList(Struct, frozen=True):
    allowed: bool
    decisions: Sequence[Decision]


class HistoryEntry(Struct, frozen=True):
    """One change: its place in the log, what was done, by whom, why, and the rule after
    it.
    """

    seq: int
    version: int
    action: str
    actor: str
    reason: str
    at: str
    rule: RuleBody
    changeID: str = ""
    """Of an import: the same for all that it changed."""


class HistoryPage(Struct, frozen=True):
    changes: Sequence[HistoryEntry]


class ChangesPage(Struct, frozen=True):
    """``head`` is where the log ends now."""

    changes: Sequence[HistoryEntry]
    head: int


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
    rules = await call.in_time(control.page(query.tenantID, _place(query.after), query.limit + 1))
    shown = rules[: query.limit]
    more = len(rules) > query.limit
    return Answer(
        RulePage([render(rule) for rule in shown], _told_place(shown[-1].name) if more else None)
    )


def _told_place(name: RuleName) -> str:
    """The end of a page, in characters safe in a URL. No name contains a space."""
    return base64.urlsafe_b64encode(" ".join(name).encode()).decode().rstrip("=")


def _place(after: str | None) -> RuleName | None:
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
    rule, told = change.rule, (change.action, change.actor, change.reason, change.at)
    return HistoryEntry(change.seq, rule.version, *told, render(rule), change.change_id)


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
    asked = (
        [question._replace(cost=count) for question in checks_of("check", call.principal.user)]
        if count
        else ()
    )
    try:
        decisions = [await deps.limits.limiter.check(*question) for question in asked]
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
