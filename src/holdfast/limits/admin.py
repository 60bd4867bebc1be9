"""What an operator can do to the rules: create, change, delete, import, roll back.

The store decides and commits. This module reads requests, and counts and logs each call
by its outcome. The store may be unavailable while limiting continues; only calls made
here fail then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from holdfast import telemetry
from holdfast.clock import Clock, Ids, timestamp
from holdfast.errors import (
    HoldfastError,
    InvalidRule,
    KeyReused,
    NotFound,
    OutcomeUnknown,
    Unavailable,
    VersionConflict,
)
from holdfast.limits.rule_changes import (
    Change,
    RuleChange,
    RuleChangeResult,
    _Action,
    missing,
    rollback_body,
)
from holdfast.limits.rule_import import ImportResult, RuleDifference, RuleImport, read_rules
from holdfast.limits.rule_json import (
    REQUIRED,
    check_names,
    field_problems,
    name_problems,
    refuse,
    settable,
)
from holdfast.limits.rules import AnyRule, Rule, RuleName, UnreadableRule
from holdfast.limits.rulestore.contract import RuleStore
from holdfast.message import ID_BYTES_MAX, check_id

REASON_LENGTH_MAX = 500
VERSION_MAX = 2**53 - 1
"""The largest integer that every JSON reader preserves."""
HEALTH_TIMEOUT_SECONDS = 2.0

_WORDS: list[tuple[type[HoldfastError], str]] = [
    (Unavailable, "db_connection_failed"),
    (OutcomeUnknown, "commit_unknown"),
    (VersionConflict, "version_conflict"),
    (InvalidRule, "invalid"),
    (NotFound, "not_found"),
    (KeyReused, "key_reused"),
]


class RuleRequest:
    """The parsed body of an admin call: the rule's name and fields, and the rest."""

    __slots__ = ("expected_version", "fields", "key", "name", "reason", "version")

    def __init__(self, action: _Action, body: Mapping[str, Any], key: str | None) -> None:
        """InvalidRule lists everything wrong with the request.

        Only if it is otherwise valid are the rule's fields left for the store to check,
        because a repetition gets its first answer.
        """
        self.fields = dict(body)
        self.version: int | None = (
            self.fields.pop("version", None) if action == "rollback" else None
        )
        self.expected_version: int | None = self.fields.pop("expectedVersion", None)
        self.reason: str = self.fields.pop("reason", "")
        said: str | None = self.fields.pop("idempotencyKey", None)
        self.key = said if said is not None else key
        problems = self._problems(action) | name_problems(self.fields)
        if key is not None and self.key != key:
            problems["idempotencyKey"] = "is another than the header's; send one of them"
        if problems and action in ("create", "update"):
            problems = (
                field_problems(self.fields, REQUIRED if action == "create" else ()) | problems
            )
        refuse(problems)
        self.name = RuleName(self.fields.pop("tenantID"), self.fields.pop("resource"))

    def _problems(self, action: _Action) -> dict[str, str]:
        problems = {}
        if action in ("delete", "rollback"):
            problems = {
                field: "has no meaning here"
                for field in self.fields
                if field not in ("tenantID", "resource")
            }
        if action == "rollback" and not _is_version(self.version):
            problems["version"] = "must be an earlier version"
        if self.expected_version is None:
            if action in ("update", "delete"):
                problems["expectedVersion"] = "is required"
        elif action == "create":
            problems["expectedVersion"] = "has no meaning here: there is no version yet"
        elif not _is_version(self.expected_version):
            problems["expectedVersion"] = "must be a version number"
        if not isinstance(self.reason, str) or len(self.reason) > REASON_LENGTH_MAX:
            problems["reason"] = f"must be a text of at most {REASON_LENGTH_MAX} characters"
        if self.key is not None and (
            not isinstance(self.key, str) or check_id(self.key, "idempotencyKey")
        ):
            problems["idempotencyKey"] = (
                f"must be 1 to {ID_BYTES_MAX} printable ASCII characters without spaces"
            )
        return problems


class ImportRequest(NamedTuple):
    """What an import says besides its rules."""

    dry_run: bool = False
    expected_digest: str | None = None
    reason: str = ""


def _read_rules(rules: Raw) -> tuple[Rule, ...]:
    try:
        return read_rules(msgspec.json.decode(rules, type=list[dict[str, Any]]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        refuse({"rules": "must be a list of rules"})
        raise


class RuleAdmin:
    """The operator's verbs; errors are the store's. ``health`` names ``database``."""

    def __init__(self, store: RuleStore, clock: Clock, database: str) -> None:
        self._store = store
        self._clock = clock
        self._ids = Ids(clock)
        self._database = database

    async def create(
        self, body: Mapping[str, Any], actor: str, key: str | None = None
    ) -> RuleChangeResult:
        async with _observed("create_rule"):
            return await self._change("create", RuleRequest("create", body, key), actor)

    async def update(
        self, body: Mapping[str, Any], actor: str, key: str | None = None
    ) -> RuleChangeResult:
        """Change the fields that the body names. It must say which version it saw."""
        async with _observed("update_rule"):
            return await self._change("update", RuleRequest("update", body, key), actor)

    async def delete(
        self, body: Mapping[str, Any], actor: str, key: str | None = None
    ) -> RuleChangeResult:
        async with _observed("delete_rule"):
            return await self._change("delete", RuleRequest("delete", body, key), actor)

    async def roll_back(
        self, body: Mapping[str, Any], actor: str, key: str | None = None
    ) -> RuleChangeResult:
        """Restore the rule as it was in ``version``, as a new version."""
        async with _observed("rollback_rule"):
            request = RuleRequest("rollback", body, key)
            past = await self._store.history(request.name, (request.version or 0) + 1, 1)
            if not past or past[0].rule.version != request.version or past[0].rule.deleted:
                raise NotFound(f"there is no version {request.version} of this rule to go back to")
            earlier = past[0].rule
            if isinstance(earlier, UnreadableRule):
                refuse(
                    {"version": f"is no rule that this version of Holdfast knows ({earlier.why})"}
                )
            else:
                request.fields = rollback_body(earlier)
            return await self._change("rollback", request, actor)

    async def import_rules(
        self, rules: Raw, actor: str, request: ImportRequest, key: str | None = None
    ) -> tuple[ImportResult, Sequence[RuleDifference]]:
        """Set many rules to what a JSON list says, all or none; see ``rule_import``.

        The list is parsed in a thread: a large one would block the event loop.
        """
        async with _observed("import_rules"):
            if len(request.reason) > REASON_LENGTH_MAX:
                refuse({"reason": f"must be a text of at most {REASON_LENGTH_MAX} characters"})
            wanted = RuleImport(
                await asyncio.to_thread(_read_rules, rules),
                actor,
                timestamp(self._clock.now()),
                self._ids.new("chg_"),
                request.expected_digest,
                request.reason,
                key,
                request.dry_run,
            )
            return await self._store.import_rules(wanted)

    async def get(self, name: RuleName) -> AnyRule:
        async with _observed("get_rule"):
            rule = await self._store.get(name)
            if rule is None or rule.deleted:
                raise missing(name)
            return rule

    async def page(
        self, tenant: str | None, after: RuleName | None, limit: int
    ) -> Sequence[AnyRule]:
        async with _observed("list_rules"):
            if tenant is not None:
                check_names({"tenantID": tenant})
            return await self._store.page(tenant, after, limit)

    async def history(self, name: RuleName, before: int | None, limit: int) -> Sequence[RuleChange]:
        """Newest first, as far as the log goes. NotFound if the rule never existed."""
        async with _observed("rule_history"):
            changes = await self._store.history(name, before, limit)
            if not changes and before is None and await self._store.get(name) is None:
                raise missing(name)
            return changes

    async def changes(self, after: int, limit: int) -> tuple[int, Sequence[RuleChange]]:
        """The end of the log, and the changes after ``after``, oldest first."""
        async with _observed("rule_changes"):
            changes = await self._store.changes_after(after, limit)
            return (await self._store.head()).seq, changes

    async def is_reachable(self) -> bool:
        """Whether the store answers: only then can rules be changed."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_SECONDS):
                await self._store.head()
        except (HoldfastError, TimeoutError):
            return False
        return True

    async def health(self) -> dict[str, str]:
        """Whether rules can be changed, in the words of the design document."""
        primary = "reachable" if await self.is_reachable() else "unreachable"
        status = "healthy" if primary == "reachable" else "unhealthy"
        return {"status": status, f"{self._database}_primary": primary}

    async def ensure(self, rules: Sequence[Rule], actor: str = "holdfast") -> None:
        """Create these rules unless one of that name ever existed, even if deleted."""
        for rule in rules:
            if await self._store.get(rule.name) is None:
                body = {**settable(rule), "reason": "the rule this resource starts with"}
                try:
                    await self.create(body, actor)
                except VersionConflict:
                    continue  # another node was first

    async def _change(self, action: _Action, request: RuleRequest, actor: str) -> RuleChangeResult:
        change = Change(
            action,
            request.name,
            actor,
            timestamp(self._clock.now()),
            request.fields,
            request.expected_version,
            request.reason,
            request.key,
        )
        return await self._store.change(change)


def _is_version(value: object) -> bool:
    return type(value) is int and 1 <= value <= VERSION_MAX


@asynccontextmanager
async def _observed(operation: str) -> AsyncIterator[None]:
    """Count, log and trace an admin call by its outcome."""
    with telemetry.span(operation, {"holdfast.operation": operation}) as span:
        try:
            yield
        except HoldfastError as error:
            word = next((word for kind, word in _WORDS if isinstance(error, kind)), "other")
            telemetry.admin_error(operation, word)
            telemetry.log.warning("limits.admin_call_failed", operation=operation, error=word)
            span.set_attribute("holdfast.outcome", word)
            raise
        except asyncio.CancelledError:
            telemetry.admin_error(operation, "no_answer_in_time")
            telemetry.log.warning(
                "limits.admin_call_failed", operation=operation, error="no_answer_in_time"
            )
            span.set_attribute("holdfast.outcome", "no_answer_in_time")
            raise
        telemetry.log.debug("limits.admin_call_completed", operation=operation)
        span.set_attribute("holdfast.outcome", "ok")
