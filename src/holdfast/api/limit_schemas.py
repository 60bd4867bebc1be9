"""Bodies, queries and answers of the endpoints of limits. (Pure.)

Rule bodies have the field names of the rules' own JSON form (``limits.rule_json``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from holdfast.api.schemas import RequestBody, _Reason
from holdfast.bounds import MIB
from holdfast.limits.admin import REASON_LENGTH_MAX, VERSION_MAX
from holdfast.limits.counters.contract import KEYS_PER_CALL_MAX
from holdfast.limits.limiter.decisions import SUBJECT_LENGTH_MAX
from holdfast.limits.rule_import import RULES_MAX, RuleDifference
from holdfast.limits.rule_json import (
    CHOICES,
    LIMIT_MAX,
    REQUIRED,
    RESOURCE_LENGTH_MAX,
    TENANT_LENGTH_MAX,
    WINDOW_PATTERN,
)
from holdfast.limits.rules import Decision
from holdfast.message import ID_BYTES_MAX

_VERSION = {"type": "integer", "minimum": 1, "maximum": VERSION_MAX}
_RULE = {
    "tenantID": {
        "type": "string", "minLength": 1, "maxLength": TENANT_LENGTH_MAX,
        "pattern": r"^(\*|[!-)+-z|~]+)$",
    },
    "resource": {
        "type": "string", "minLength": 1, "maxLength": RESOURCE_LENGTH_MAX,
        "pattern": r"^[!-)+-~]*\*?$",
    },
    "algorithm": {"enum": CHOICES["algorithm"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX},
    "window": {
        "type": "string", "pattern": f"^{WINDOW_PATTERN}$", "description": "from 100ms to 366d",
    },
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
    unreadable = {
        "unreadable": {
            "type": "string",
            "description": "why this version cannot apply it, and what to do",
        }
    }
    fields = {**{name: {} for name in _RULE}, **_NAME, **_KEPT, **unreadable}
    shape = _described((*REQUIRED, *_KEPT), fields).extra_json_schema or {}
    readable = {"if": {"not": {"required": [*unreadable]}}, "then": {"properties": _RULE}}
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
_PageToken = Annotated[
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
    """``digest`` and ``seq`` are of the rules now.

    Only a dry run lists ``changes``, and it has no ``changeID``.
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
    """One rule if both names are given, else a page.

    ``after`` is the ``next`` of the page before.
    """

    tenantID: str | None = None
    resource: str | None = None
    after: _PageToken | None = None
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
    """May ``subject`` use ``cost`` of ``resource``, of the credential's tenant?"""

    resource: Resource
    subject: _Subject
    cost: Amount = 1


class ChargeBody(RequestBody, frozen=True):
    """``subject`` has used ``amount`` of ``resource``; a negative one gives back."""

    resource: Resource
    subject: _Subject
    amount: Annotated[int, Meta(ge=-LIMIT_MAX, le=LIMIT_MAX)]


class Charged(Struct, frozen=True):
    """``charged`` false: no rule counts it."""

    charged: bool


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
    """One change: its number in the log, who did what and why, and the rule after."""

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
