"""Every endpoint × every kind of caller: one matrix, written out.

The world: tenant acme has a group of alice (owner), adam (admin), mia (member) and once
had eve, who was removed; nobody knows nora there; zed is banned from it, and mum is
muted in it. Tenant evil has users of the same names. Messages 1 (alice), 2 (mia) and 3
(eve's removal) are in the group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_rig import Rest, error_of, serving

from holdfast.access.revocations.contract import Revocation
from holdfast.api.routes import ENDPOINTS
from holdfast.message import User

OK = "ok"
ANONYMOUS = {
    "nobody": "UNAUTHORIZED",
    "garbage": "UNAUTHORIZED",
    "expired": "UNAUTHORIZED",
    "unknown key": "UNAUTHORIZED",
}
NO_USER = {
    **ANONYMOUS,
    "tenant key": "FORBIDDEN",
    "admin key": "FORBIDDEN",
    "admin key acting as alice": "FORBIDDEN",
    "alice acting as adam": "FORBIDDEN",
}
OUTSIDERS = {
    **NO_USER,
    "evil's alice": "NOT_FOUND",
    "evil's key as alice": "NOT_FOUND",
    "nora": "NOT_A_MEMBER",
    "eve": "NOT_A_MEMBER",
}  # fmt: skip
MEMBERS = {"alice": OK, "adam": OK, "mia": OK, "key as alice": OK, "key as mia": OK}
STAFF = {**MEMBERS, "mia": "FORBIDDEN", "key as mia": "FORBIDDEN"}
OWNER = {**STAFF, "adam": "FORBIDDEN"}
OPERATOR = {
    **ANONYMOUS,
    "alice": "FORBIDDEN",
    "tenant key": "FORBIDDEN",
    "key as alice": "FORBIDDEN",
    "admin key acting as alice": "FORBIDDEN",
    "admin key without scopes for it": "FORBIDDEN",
    "admin key": OK,
}
FINDER = {**OPERATOR, "admin key": "NOT_FOUND"}
"""This server has no rule, job or webhook: permitted callers get these answers."""
RULER = {**OPERATOR, "admin key": "INVALID_RULE"}
"""What makes a good rule is in tests/unit/test_limits_api.py."""
CHECKER = {**ANONYMOUS, "alice": "FORBIDDEN", "admin key": "FORBIDDEN", "tenant key": OK,
           "read-only key as alice": "FORBIDDEN"}  # fmt: skip
OWNERS = {
    **ANONYMOUS,
    "admin key": "FORBIDDEN",
    "admin key acting as alice": "FORBIDDEN",
    "alice acting as adam": "FORBIDDEN",
    "read-only key as alice": "FORBIDDEN",
    "alice": OK,
    "tenant key": OK,
    "key as alice": OK,
}
"""Who may have replies of their own."""
STRANGERS = {caller: "NOT_FOUND" if is_ok == OK else is_ok for caller, is_ok in OWNERS.items()}
"""There is no such reply."""
NONE_THERE = frozenset({404})
"""What an act answers that finds nothing to do; it is in the audit log all the same."""
READ_ONLY = {"read-only key as alice": "FORBIDDEN"}
EVERYBODY = dict.fromkeys(
    [*ANONYMOUS, "alice", "nora", "evil's alice", "tenant key", "admin key"], OK
)


@dataclass(frozen=True)
class Row:
    """One endpoint, a request that is right, and what becomes of it by caller."""

    name: str
    method: str
    path: str
    callers: dict[str, str]
    body: Any = None
    key: str | None = None
    answers: frozenset[int] = field(default=frozenset({200, 201}))


C = "/v1/chats/{chat}"
WHY = {"reason": "a test"}
ROWS = [
    Row(
        "create_chat",
        "POST",
        "/v1/chats",
        {**NO_USER, **READ_ONLY, "alice": OK, "nora": OK, "key as mia": OK},
        {"name": "New"},
    ),
    Row(
        "list_chats",
        "GET",
        "/v1/chats",
        {**NO_USER, "alice": OK, "nora": OK, "evil's alice": OK, "key as mia": OK},
    ),
    Row("get_chat", "GET", C, {**OUTSIDERS, **MEMBERS, "read-only key as alice": OK}),
    Row("rename_chat", "PATCH", C, {**OUTSIDERS, **STAFF, **READ_ONLY}, {"name": "Renamed"}),
    Row("list_members", "GET", C + "/members", {**OUTSIDERS, **MEMBERS}),
    Row(
        "add_member",
        "POST",
        C + "/members",
        {**OUTSIDERS, **STAFF, **READ_ONLY},
        {"user_id": "zoe"},
    ),
    Row(
        "add_member",
        "POST",
        C + "/members",
        {**OUTSIDERS, **OWNER},
        {"user_id": "zoe", "role": "admin"},
    ),
    Row(
        "change_role",
        "PATCH",
        C + "/members/mia",
        {**OUTSIDERS, **OWNER, **READ_ONLY},
        {"role": "admin"},
    ),
    Row("remove_member", "DELETE", C + "/members/max", {**OUTSIDERS, **STAFF, **READ_ONLY}),
    Row(
        "remove_member",
        "DELETE",
        C + "/members/adam",
        {**OUTSIDERS, "alice": OK, "adam": OK, "mia": "FORBIDDEN"},
    ),
    Row("remove_member", "DELETE", C + "/members/mia", {"mia": OK, "adam": OK, "max": "FORBIDDEN"}),
    Row("list_bans", "GET", C + "/bans", {**OUTSIDERS, **STAFF, "read-only key as alice": OK}),
    Row("ban_user", "POST", C + "/bans", {**OUTSIDERS, **STAFF, **READ_ONLY}, {"user_id": "max"}),
    Row("ban_user", "POST", C + "/bans", {**OUTSIDERS, **OWNER}, {"user_id": "adam"}),
    Row(
        "ban_user",
        "POST",
        C + "/bans",
        dict.fromkeys(["alice", "adam", "mia"], "FORBIDDEN"),
        {"user_id": "alice"},
    ),
    Row("unban_user", "DELETE", C + "/bans/zed", {**OUTSIDERS, **STAFF, **READ_ONLY}),
    Row(
        "mute_member", "POST", C + "/mutes", {**OUTSIDERS, **STAFF, **READ_ONLY}, {"user_id": "max"}
    ),
    Row("mute_member", "POST", C + "/mutes", {**OUTSIDERS, **OWNER}, {"user_id": "adam"}),
    Row("unmute_member", "DELETE", C + "/mutes/mum", {**OUTSIDERS, **STAFF, **READ_ONLY}),
    Row("get_presence", "GET", C + "/presence", {**OUTSIDERS, **MEMBERS}),
    Row(
        "list_messages",
        "GET",
        C + "/messages",
        {**OUTSIDERS, **MEMBERS, "read-only key as alice": OK},
    ),
    Row("list_messages", "GET", C + "/messages?around=2", {**OUTSIDERS, **MEMBERS}),
    Row(
        "send_message",
        "POST",
        C + "/messages",
        {**OUTSIDERS, **MEMBERS, **READ_ONLY},
        {"content": "hi"},
        "k9",
    ),
    Row("redact_message", "DELETE", C + "/messages/1", {**OUTSIDERS, **STAFF, **READ_ONLY}),
    Row(
        "redact_message", "DELETE", C + "/messages/2", {**OUTSIDERS, **MEMBERS, "max": "FORBIDDEN"}
    ),
    Row(
        "get_status",
        "GET",
        C + "/messages/1/status",
        {
            **OUTSIDERS,
            **dict.fromkeys(["adam", "mia", "key as mia"], "FORBIDDEN"),
            "alice": OK,
            "key as alice": OK,
        },
    ),
    Row(
        "mint_token",
        "POST",
        "/v1/tokens",
        {
            **ANONYMOUS,
            **READ_ONLY,
            **dict.fromkeys(["alice", "admin key"], "FORBIDDEN"),
            "tenant key": OK,
        },
        {"user_id": "zoe"},
    ),
    Row(
        "create_chat_completion",
        "POST",
        "/v1/chat/completions",
        OWNERS,
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    ),
    Row("list_models", "GET", "/v1/models", OWNERS),
    Row("get_model", "GET", "/v1/models/tiny", OWNERS),
    Row("create_response", "POST", "/v1/responses", OWNERS, {"model": "tiny", "input": "hi"}),
    Row("get_response", "GET", "/v1/responses/none", STRANGERS),
    Row("cancel_response", "POST", "/v1/responses/none/cancel", STRANGERS),
    Row("delete_response", "DELETE", "/v1/responses/none", STRANGERS),
    Row(
        "create_reply",
        "POST",
        "/v1/replies",
        OWNERS,
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    ),
    Row("read_reply_events", "GET", "/v1/replies/none/events", STRANGERS),
    Row("cancel_reply", "DELETE", "/v1/replies/none", STRANGERS),
    Row("upgrade_needed", "GET", "/v1/ws", EVERYBODY, answers=frozenset({426})),
    Row("inspect_chat", "GET", "/admin/chats/{chat}", OPERATOR),
    Row("halt_chat", "POST", "/admin/chats/{chat}/halt", OPERATOR, WHY),
    Row("recover_chat", "POST", "/admin/chats/{chat}/recover", OPERATOR, WHY),
    Row("redact_any", "POST", "/admin/chats/{chat}/redact", OPERATOR, {**WHY, "sequence": 1}),
    Row("list_chat_bans", "GET", "/admin/chats/{chat}/bans", OPERATOR),
    Row("ban_from_chat", "POST", "/admin/chats/{chat}/ban", OPERATOR, {**WHY, "user_id": "max"}),
    Row(
        "unban_from_chat", "POST", "/admin/chats/{chat}/unban", OPERATOR, {**WHY, "user_id": "zed"}
    ),
    Row("mute_in_chat", "POST", "/admin/chats/{chat}/mute", OPERATOR, {**WHY, "user_id": "max"}),
    Row(
        "unmute_in_chat", "POST", "/admin/chats/{chat}/unmute", OPERATOR, {**WHY, "user_id": "mum"}
    ),
    Row(
        "retain_from", "POST", "/admin/chats/{chat}/retain", OPERATOR, {**WHY, "first_sequence": 1}
    ),
    Row("erase_user", "POST", "/admin/erase", OPERATOR, {**WHY, "user_id": "zoe"}),
    Row("raise_epochs", "POST", "/admin/raise-epochs", OPERATOR, WHY),
    Row("read_audit", "GET", "/admin/audit", OPERATOR),
    Row("list_keys", "GET", "/admin/keys", OPERATOR),
    Row(
        "issue_key",
        "POST",
        "/admin/keys",
        OPERATOR,
        {**WHY, "kind": "tenant", "tenant": "acme", "label": "x"},
    ),
    Row("revoke_key", "DELETE", "/admin/keys/{key}?reason=test", OPERATOR),
    Row("take_backup", "POST", "/admin/backup", OPERATOR, WHY),
    Row("get_backup_run", "GET", "/admin/backup", OPERATOR),
    Row("get_operator_status", "GET", "/admin/status", OPERATOR),
    Row("get_cluster", "GET", "/admin/cluster", OPERATOR),
    Row("list_halted_chats", "GET", "/admin/halted", OPERATOR),
    Row("list_alerts", "GET", "/admin/alerts", OPERATOR),
    Row("list_objectives", "GET", "/admin/objectives", OPERATOR),
    Row(
        "silence_alert",
        "POST",
        "/admin/alerts/silence",
        OPERATOR,
        {"alert": "HoldfastJobsOld", "seconds": 60, **WHY},
    ),
    Row(
        "end_silence",
        "POST",
        "/admin/alerts/unsilence",
        OPERATOR,
        {"alert": "HoldfastJobsOld", **WHY},
        answers=frozenset({404}),
    ),
    Row("check_sinks", "POST", "/admin/alerts/test", OPERATOR, WHY),
    Row("list_revocations", "GET", "/admin/revocations", OPERATOR),
    Row(
        "add_revocation",
        "POST",
        "/admin/revocations",
        OPERATOR,
        {**WHY, "kind": "ban", "user_id": "zoe"},
    ),
    Row("lift_revocation", "DELETE", "/admin/revocations/1?reason=test", OPERATOR),
    Row("disconnect_user", "POST", "/admin/disconnect", OPERATOR, {**WHY, "user_id": "zoe"}),
    Row("read_rules", "GET", "/admin/rules", OPERATOR),
    Row("create_rule", "POST", "/admin/rules", RULER, {"tenantID": "acme"}),
    Row("update_rule", "PUT", "/admin/rules", RULER, {"tenantID": "acme"}),
    Row("delete_rule", "DELETE", "/admin/rules?tenantID=acme&resource=x&expectedVersion=1", FINDER),
    Row("read_rule_history", "GET", "/admin/rules/history?tenantID=acme&resource=x", FINDER),
    Row("read_rule_changes", "GET", "/admin/rules/changes", OPERATOR),
    Row("import_rules", "POST", "/admin/rules/import", RULER, {"tenantID": "acme"}),
    Row("roll_back_rule", "POST", "/admin/rules/rollback", RULER, {"tenantID": "acme"}),
    Row("get_limits_status", "GET", "/admin/limits", OPERATOR),
    Row("peek_limit", "GET", "/admin/limits/subject?tenantID=acme&resource=x&subject=y", FINDER),
    Row(
        "reset_limit",
        "POST",
        "/admin/limits/subject/reset",
        FINDER,
        {**WHY, "tenantID": "acme", "resource": "x", "subject": "y"},
    ),
    Row("list_dead_letters", "GET", "/admin/dead-letters", OPERATOR),
    Row("get_dead_letter", "GET", "/admin/dead-letters/1", FINDER),
    Row(
        "replay_dead_letters",
        "POST",
        "/admin/dead-letters/replay",
        FINDER,
        {**WHY, "numbers": [1]},
    ),
    Row(
        "discard_dead_letters",
        "POST",
        "/admin/dead-letters/discard",
        FINDER,
        {**WHY, "numbers": [1]},
    ),
    Row("list_jobs", "GET", "/admin/jobs", OPERATOR),
    Row("get_job_stats", "GET", "/admin/jobs/stats", OPERATOR),
    Row("list_job_streams", "GET", "/admin/jobs/streams", OPERATOR),
    Row("list_job_breakers", "GET", "/admin/jobs/breakers", OPERATOR),
    Row("list_job_acts", "GET", "/admin/jobs/acts", OPERATOR),
    Row("list_dead_jobs", "GET", "/admin/jobs/dead", OPERATOR),
    Row("get_job", "GET", "/admin/jobs/1", FINDER),
    Row(
        "retry_jobs",
        "POST",
        "/admin/jobs/retry",
        OPERATOR,
        {"seqs": [1], "reason": "r"},
        answers=NONE_THERE,
    ),
    Row(
        "release_jobs",
        "POST",
        "/admin/jobs/release",
        OPERATOR,
        {"stream": "s", "through": 1, "reason": "r"},
        answers=NONE_THERE,
    ),
    Row(
        "park_jobs",
        "POST",
        "/admin/jobs/park",
        OPERATOR,
        {"seqs": [1], "reason": "r"},
        answers=NONE_THERE,
    ),
    Row(
        "bury_jobs",
        "POST",
        "/admin/jobs/bury",
        OPERATOR,
        {"seqs": [1], "reason": "r"},
        answers=NONE_THERE,
    ),
    Row("replay_jobs", "POST", "/admin/jobs/replay", OPERATOR, {"reason": "r"}, answers=NONE_THERE),
    Row(
        "discard_jobs", "POST", "/admin/jobs/discard", OPERATOR, {"reason": "r"}, answers=NONE_THERE
    ),
    Row("list_webhooks", "GET", "/admin/webhooks", OPERATOR),
    Row(
        "create_webhook",
        "POST",
        "/admin/webhooks",
        OPERATOR,
        {"url": "https://example.com", "reason": "r"},
    ),
    Row("delete_webhook", "DELETE", "/admin/webhooks/e?reason=r", FINDER),
    Row("enable_webhook", "POST", "/admin/webhooks/e/enable", FINDER, {"reason": "r"}),
    Row("disable_webhook", "POST", "/admin/webhooks/e/disable", FINDER, {"reason": "r"}),
    Row("check_webhook", "POST", "/admin/webhooks/e/test", FINDER, {"reason": "r"}),
    Row("list_webhook_deliveries", "GET", "/admin/webhooks/e/deliveries", FINDER),
    Row("check_limit", "POST", "/v1/limits/check", CHECKER, {"resource": "x", "subject": "y"}),
    Row(
        "check_limits",
        "POST",
        "/v1/limits/check-many",
        CHECKER,
        {"checks": [{"resource": "x", "subject": "y"}]},
    ),
    Row("list_running_replies", "GET", "/admin/replies", OPERATOR),
    Row("get_reply_summary", "GET", "/admin/replies/r", FINDER),
    Row("cancel_any_reply", "POST", "/admin/replies/r/cancel", FINDER, WHY),
    Row("read_usage", "GET", "/admin/usage", OPERATOR),
    Row(
        "charge_limit",
        "POST",
        "/v1/limits/charge",
        CHECKER,
        {"resource": "x", "subject": "y", "amount": 1},
    ),
    Row(
        "renew_limit",
        "POST",
        "/v1/limits/renew",
        CHECKER,
        {"resource": "x", "subject": "y", "hold": "z"},
    ),
    Row(
        "release_limit",
        "POST",
        "/v1/limits/release",
        CHECKER,
        {"resource": "x", "subject": "y", "hold": "z"},
    ),
    Row("get_admin_health", "GET", "/health/admin", EVERYBODY),
    Row("get_live", "GET", "/health/live", EVERYBODY),
    Row("get_ready", "GET", "/health/ready", EVERYBODY),
    Row("get_metrics", "GET", "/metrics", OPERATOR),
]


def folder_of(row: Row, folder: Path) -> Path | None:
    """Only what is about rules and webhooks needs one."""
    return folder if re.search("rule|webhook|health", row.path) else None


def test_the_matrix_has_every_endpoint() -> None:
    assert {row.name for row in ROWS} == {endpoint.name for endpoint in ENDPOINTS}


async def world(rest: Rest) -> dict[str, str]:
    chat = await rest.chat("alice", ["adam", "mia", "max", "mum", "eve"])
    alice = rest.token("alice")
    assert (await rest.send(chat, "one", "k1")).status_code == 201
    assert (await rest.send(chat, "two", "k2", rest.token("mia"))).status_code == 201
    answer = await rest.ask("PATCH", f"/v1/chats/{chat}/members/adam", alice, {"role": "admin"})
    assert answer.status_code == 200
    assert (await rest.ask("DELETE", f"/v1/chats/{chat}/members/eve", alice)).status_code == 200
    for verb, user_id in (("bans", "zed"), ("mutes", "mum")):
        assert (
            await rest.ask("POST", f"/v1/chats/{chat}/{verb}", alice, {"user_id": user_id})
        ).status_code == 200
    await rest.deps.revocations.add(Revocation("ban", "acme", "zed", "", 0, "then", None))
    key, _ = await rest.deps.keys.issue(
        "tenant", "spare", "2026-01-01T00:00:00.000Z", tenant="acme"
    )
    return {"chat": chat, "key": key.key_id}


def credential(rest: Rest, caller: str, row: Row) -> tuple[str | None, dict[str, str]]:
    """The bearer and the other headers of a caller of the matrix."""
    name, _, acted = caller.partition(" acting as ")
    if not acted:
        name, _, acted = caller.partition(" as ")
    headers = {"X_Act_As": acted} if acted else {}
    match name:
        case "nobody":
            return None, headers
        case "garbage":
            return "garbage", headers
        case "unknown key":
            return "hf_admin_" + "A" * 43, headers
        case "expired":
            token = rest.token("alice", ttl_seconds=1)
            rest.clock.advance(60)
            return token, headers
        case "tenant key" | "key":
            return rest.tenant_key(), headers
        case "read-only key":
            return rest.tenant_key(scopes=["chats:read"]), headers
        case "evil's key":
            return rest.tenant_key("evil"), headers
        case "admin key":
            return rest.admin_key(), headers
        case "admin key without scopes for it":
            wanted = next(e.scope for e in ENDPOINTS if e.name == row.name)
            return rest.admin_key("backup" if wanted != "backup" else "status:read"), headers
        case "evil's alice":
            return rest.token("alice", "evil"), headers
        case _:
            return rest.token(name), headers


async def ask(rest: Rest, row: Row, caller: str, names: dict[str, str]) -> httpx.Response:
    bearer, headers = credential(rest, caller, row)
    if row.key:
        headers["Idempotency_Key"] = row.key
    return await rest.ask(row.method, row.path.format(**names), bearer, row.body, **headers)


@pytest.mark.real_time
@pytest.mark.parametrize("row", ROWS, ids=[f"{row.name}-{row.path}" for row in ROWS])
async def test_who_may_not_is_refused_by_name_and_nothing_changes(row: Row, tmp_path: Path) -> None:
    async with serving(folder=folder_of(row, tmp_path)) as rest:
        names = await world(rest)
        before = await everything(rest)
        for caller, expected in row.callers.items():
            if expected != OK:
                answer = await ask(rest, row, caller, names)
                status, code = error_of(answer)
                assert code == expected and 400 <= status < 500, (caller, answer.text)
                assert await everything(rest) == before, caller


GRANTED = [
    (row, caller) for row in ROWS for caller, expected in row.callers.items() if expected == OK
]


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("row", "caller"),
    GRANTED,
    ids=[f"{i}-{row.name}-{caller}" for i, (row, caller) in enumerate(GRANTED)],
)
async def test_who_may_is_answered(row: Row, caller: str, tmp_path: Path) -> None:
    async with serving(folder=folder_of(row, tmp_path)) as rest:
        answer = await ask(rest, row, caller, await world(rest))
        assert answer.status_code in row.answers, answer.text


async def everything(rest: Rest) -> list[object]:
    """All the state there is, to see that a refusal left it alone."""
    users = [User("acme", "alice"), User("acme", "mia")]
    chats = [
        summary.chat.chat_id
        for user in users
        for summary in (await rest.store.chats_of(user, 100)).chats
    ]
    state: list[object] = [
        (await rest.store.audit(None, 1000)).records,
        [key.label for key in rest.deps.keys.list() if key.label == "spare"],
        len(rest.deps.revocations),
    ]
    for chat in sorted(set(chats)):
        state += [
            await rest.store.inspect(chat),
            await rest.store.members(chat),
            await rest.store.bans(chat),
        ]
        state += [await rest.store.read_after(chat, 0, 100, 1 << 20)]
    return state
