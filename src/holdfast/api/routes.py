"""The table of every endpoint and page.

``app``, ``/openapi.json``, ``/docs`` and docs/reference/rest.md are built from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.api import admin, chats, jobs, limits, messages, probes, revocations, webhooks
from holdfast.api import limit_schemas as schemas
from holdfast.api.deps import Backup, BackupRun, PresenceView
from holdfast.api.endpoint import Endpoint, WebPage
from holdfast.api.openapi import openapi_json
from holdfast.api.reference import STYLE, html_page
from holdfast.api.schemas import (
    AuditQuery,
    BanList,
    ChangeAnswer,
    ChatDetail,
    ChatsQuery,
    DeliveryStatus,
    ErasePerson,
    Health,
    IssuedKey,
    KeyList,
    KeyView,
    MemberList,
    MessagePage,
    MessagesQuery,
    NewChat,
    NewKey,
    NewMember,
    NewMessage,
    NewRole,
    NewToken,
    OneUser,
    RedactOne,
    Renamed,
    RestrictOne,
    RetainFrom,
    RevokeKey,
    TokenAnswer,
    Why,
)
from holdfast.ingest.erasure import Erasure
from holdfast.limits.limiter.decisions import Standing
from holdfast.limits.rules import Decision
from holdfast.store.contract import UNREAD_LOOKED_AT, AuditPage, ChatPage, Inspection
from holdfast.wire.frames import ErrorBody, MessageAck

CHAT = "/v1/chats/{chat_id}"
MEMBER = CHAT + "/members/{user_id:path}"
MESSAGE = CHAT + "/messages/{sequence}"
OPERATED = "/admin/chats/{chat_id}"

CHATS: Sequence[Endpoint] = (
    Endpoint(
        "POST", "/v1/chats", chats.create_chat, "Create a chat", "user", "chats:create",
        body=NewChat, answer=ChangeAnswer, status=201, key="optional",
        also={200: "It exists: the pair has a direct chat already, or this key was used before."},
        note="The caller becomes the owner of a group; the two members of a direct chat are equal.",
    ),
    Endpoint(
        "GET", "/v1/chats", chats.list_chats, "List one's chats, newest activity first", "user", "chats:read",
        query=ChatsQuery, answer=ChatPage,
        note="With display title, own role, last message and `unread`: how many texts of others, neither redacted nor "
        f"erased, are past what the user has read. The {UNREAD_LOOKED_AT} newest messages of a chat are looked at; "
        "where older ones may be unread too, `unread_capped` is true and the number means so many or more.",
    ),
    Endpoint("GET", CHAT, chats.get_chat, "One chat with its members", "user", "chats:read", answer=ChatDetail),
    Endpoint(
        "PATCH", CHAT, chats.rename_chat, "Rename a chat", "user", "chats:members", body=Renamed, answer=ChangeAnswer
    ),
    Endpoint(
        "GET", CHAT + "/members", chats.list_members, "List the members", "user", "chats:read", answer=MemberList
    ),
    Endpoint(
        "POST", CHAT + "/members", chats.add_member, "Add a member", "user", "chats:members",
        body=NewMember, answer=ChangeAnswer, key="optional",
    ),
    Endpoint(
        "PATCH", MEMBER, chats.change_role, "Change a member's role", "user", "chats:members",
        body=NewRole, answer=ChangeAnswer,
    ),
    Endpoint(
        "DELETE", MEMBER, chats.remove_member, "Remove a member, or leave", "user", "chats:send",
        answer=ChangeAnswer,
        note="Removing oneself is leaving; removing somebody else needs the scope chats:members. Who is no member any "
        "more cannot read the history.",
    ),
    Endpoint(
        "GET", CHAT + "/bans", chats.list_bans, "Who is banned from the chat", "user", "chats:read", answer=BanList,
        note="And who is muted in it, those who have left included. For its owners and admins.",
    ),
    Endpoint(
        "POST", CHAT + "/bans", chats.ban_user, "Ban somebody from the chat", "user", "chats:members",
        body=OneUser, answer=ChangeAnswer, key="optional",
        note="A member is removed; nobody can add them again until the ban is lifted. By an admin, and only an owner "
        "bans an admin; an owner cannot be banned.",
    ),
    Endpoint(
        "DELETE", CHAT + "/bans/{user_id:path}", chats.unban_user, "Lift a ban", "user", "chats:members",
        answer=ChangeAnswer, note="They are not added by it. 404 if there is no such ban.",
    ),
    Endpoint(
        "POST", CHAT + "/mutes", chats.mute_member, "Mute a member", "user", "chats:send",
        body=OneUser, answer=ChangeAnswer, key="optional",
        note="A muted member reads; sends, names and new members are refused (403 FORBIDDEN) until that is lifted, "
        "also after leaving and coming back. By an admin, and only an owner mutes an admin; an owner cannot be muted. "
        "In a direct chat each member may mute the other, which declines the chat.",
    ),
    Endpoint(
        "DELETE", CHAT + "/mutes/{user_id:path}", chats.unmute_member, "Lift a mute", "user", "chats:send",
        answer=ChangeAnswer, note="By whoever may mute, also of somebody who has left. 404 if they are not muted.",
    ),
    Endpoint(
        "GET", CHAT + "/presence", chats.get_presence, "Who of the members is online", "user", "chats:read",
        answer=PresenceView,
    ),
)  # fmt: skip

MESSAGES: Sequence[Endpoint] = (
    Endpoint(
        "GET", CHAT + "/messages", messages.list_messages, "Read messages", "user", "chats:read",
        query=MessagesQuery, answer=MessagePage,
        note="Before, after or around a sequence; the newest if no place is given. A page ends at its limit or at "
        "256 KiB, whichever is first.",
    ),
    Endpoint(
        "POST", CHAT + "/messages", messages.send_message, "Send a message", "user", "chats:send",
        body=NewMessage, answer=MessageAck, status=201, key="required",
        also={200: "It was stored before under the same key: `deduplicated` is true."},
        note="The Idempotency-Key is the client_message_id. The answer comes after the commit on stable storage.",
    ),
    Endpoint(
        "DELETE", MESSAGE, messages.redact_message, "Redact a message", "user", "chats:send",
        answer=ChangeAnswer,
        note="The content goes for ever; the sequence and the key stay. By its sender or an admin of the chat.",
    ),
    Endpoint(
        "GET", MESSAGE + "/status", messages.get_status, "Who has a message and who has read it", "user",
        "chats:read", answer=DeliveryStatus, note="For its sender.",
    ),
    Endpoint(
        "POST", "/v1/tokens", chats.mint_token, "Mint a user token", "tenant", "tokens:write",
        body=NewToken, answer=TokenAnswer, status=201,
    ),
    Endpoint(
        "GET", "/v1/ws", probes.upgrade_needed, "The WebSocket", "anybody", answer=ErrorBody, status=426,
        note="Speaks the protocol `holdfast.v1`; a request without an upgrade gets 426.",
    ),
)  # fmt: skip

ADMIN: Sequence[Endpoint] = (
    Endpoint(
        "GET", OPERATED, admin.inspect_chat, "A chat's counter, head, count and gaps", "operator", "chats:read",
        answer=Inspection,
    ),
    Endpoint(
        "POST", OPERATED + "/halt", admin.halt_chat, "Refuse sends to a chat", "operator", "chats:write",
        body=Why, answer=ChangeAnswer, key="optional",
    ),
    Endpoint(
        "POST", OPERATED + "/recover", admin.recover_chat, "Repair a chat's numbering and resume it", "operator",
        "chats:write", body=Why, answer=ChangeAnswer, key="optional",
        note="Raises the chat's epoch: clients drop their copy and read it anew.",
    ),
    Endpoint(
        "POST", OPERATED + "/redact", admin.redact_any, "Redact any message", "operator", "chats:write",
        body=RedactOne, answer=ChangeAnswer, key="optional",
    ),
    Endpoint(
        "GET", OPERATED + "/bans", admin.list_chat_bans, "Who is banned from a chat", "operator", "chats:read",
        answer=BanList, note="And who is muted in it, those who have left included.",
    ),
    Endpoint(
        "POST", OPERATED + "/ban", admin.ban_from_chat, "Ban somebody from a chat", "operator", "chats:write",
        body=RestrictOne, answer=ChangeAnswer, key="optional",
        note="A member is removed; nobody can add them again until the ban is lifted. An owner cannot be banned.",
    ),
    Endpoint(
        "POST", OPERATED + "/unban", admin.unban_from_chat, "Lift a ban from a chat", "operator", "chats:write",
        body=RestrictOne, answer=ChangeAnswer, key="optional",
    ),
    Endpoint(
        "POST", OPERATED + "/mute", admin.mute_in_chat, "Mute a member of a chat", "operator", "chats:write",
        body=RestrictOne, answer=ChangeAnswer, key="optional", note="An owner cannot be muted.",
    ),
    Endpoint(
        "POST", OPERATED + "/unmute", admin.unmute_in_chat, "Lift a mute in a chat", "operator", "chats:write",
        body=RestrictOne, answer=ChangeAnswer, key="optional",
    ),
    Endpoint(
        "POST", OPERATED + "/retain", admin.retain_from, "Delete a chat's oldest messages", "operator",
        "chats:write", body=RetainFrom, answer=ChangeAnswer, key="kept",
        note="Those before `first_sequence`, for ever; numbering goes on. `chat.first_sequence` in the answer "
        "tells how far it came in its time: repeat, under another key, until it is there.",
    ),
    Endpoint(
        "POST", "/admin/erase", admin.erase_user, "Erase a person", "operator", "chats:write",
        body=ErasePerson, answer=Erasure, key="kept",
        note="The content of every text of a user goes for ever, and so do memberships of groups, devices and kept "
        "answers. As far as its time allows: repeat with `after` set to `next` until `done`.",
    ),
    Endpoint(
        "GET", "/admin/audit", admin.read_audit, "The audit log, oldest first", "operator", "audit:read",
        query=AuditQuery, answer=AuditPage,
    ),
    Endpoint("GET", "/admin/keys", admin.list_keys, "List the API keys", "operator", "keys:write", answer=KeyList),
    Endpoint(
        "POST", "/admin/keys", admin.issue_key, "Issue an API key", "operator", "keys:write",
        body=NewKey, answer=IssuedKey, status=201, key="kept", secret="secret",
        note="An admin key can hand out only scopes it carries itself.",
    ),
    Endpoint(
        "DELETE", "/admin/keys/{key_id}", admin.revoke_key, "Revoke an API key", "operator", "keys:write",
        query=RevokeKey, answer=KeyView,
        note="403 for the last key that can make keys, unless `force` is true.",
    ),
    Endpoint(
        "POST", "/admin/backup", admin.take_backup, "Take a backup on the server", "operator", "backup",
        body=Why, answer=Backup, key="kept",
        note="Of all files but the secrets, while serving. The answer comes when it is complete and checked.",
    ),
    Endpoint(
        "GET", "/admin/backup", admin.get_backup_run, "How far the backup that is being taken has come", "operator",
        "backup", answer=BackupRun,
    ),
    Endpoint(
        "GET", "/admin/status", probes.get_operator_status, "The state of this node", "operator", "status:read",
        answer=Mapping[str, Any],
    ),
)  # fmt: skip

CUT_OFF: Sequence[Endpoint] = (
    Endpoint(
        "GET", "/admin/revocations", revocations.list_revocations, "Who is cut off, oldest first", "operator",
        "access:write", query=revocations.RevocationsQuery, answer=revocations.RevocationPage,
        note="Revoked tokens, users, devices and tenants, and users banned or muted in a whole tenant. Bans and mutes "
        "of one chat are the chat's.",
    ),
    Endpoint(
        "POST", "/admin/revocations", revocations.add_revocation, "Cut somebody off", "operator", "access:write",
        body=revocations.NewRevocation, answer=revocations.RevocationView, status=201, key="kept",
        note="It counts when the answer comes; sockets it concerns are closed (`unauthorized`, 4502) within a second. "
        "A second one of the same thing is merged with the first. A ban and a mute last until they are lifted; the "
        "others end when every token they concern has expired.",
    ),
    Endpoint(
        "DELETE", "/admin/revocations/{number}", revocations.lift_revocation, "Undo it", "operator", "access:write",
        query=Why, answer=revocations.RevocationView, note="404 if there is none of this number.",
    ),
    Endpoint(
        "POST", "/admin/disconnect", revocations.disconnect_user, "Close a user's or a device's sockets", "operator",
        "access:write", body=revocations.Disconnect, answer=revocations.Disconnected, key="kept",
        note="They may come back at once; to keep them out, revoke or ban first. `closed` 0: nobody matched.",
    ),
)  # fmt: skip

_OF_A_RULE = frozenset({404, 409, 422})
_OF_A_CHECK = frozenset({404, 422})

RULES: Sequence[Endpoint] = (
    Endpoint(
        "GET", "/admin/rules", limits.read_rules, "Read one rule, or list rules in pages", "operator", "rules:read",
        query=schemas.RulesQuery, answer=Mapping[str, Any], errors=_OF_A_RULE,
        on_invalid_input=limits.invalid_rule,
        note="With `tenantID` and `resource` the rule itself; otherwise `{rules, next}`; the `next` of a page is the "
        "`after` of the one after it.",
    ),
    Endpoint(
        "POST", "/admin/rules", limits.create_rule, "Create a rule", "operator", "rules:write",
        body=schemas.NewRule, answer=schemas.RuleBody, status=201, key="optional", errors=_OF_A_RULE,
        on_invalid_input=limits.invalid_rule, note="What the fields mean is in the guide to limits. 409 if it exists.",
    ),
    Endpoint(
        "PUT", "/admin/rules", limits.update_rule, "Change fields of a rule", "operator", "rules:write",
        body=schemas.RuleUpdate, answer=schemas.RuleBody, key="optional", errors=_OF_A_RULE,
        on_invalid_input=limits.invalid_rule,
        note="`expectedVersion` is the version you saw; 409 with `currentVersion` and the rule if it is not the last. "
        "What is not named stays; `burstSize` null unsets it, and so does an algorithm that has none.",
    ),
    Endpoint(
        "DELETE", "/admin/rules", limits.delete_rule, "Delete a rule", "operator", "rules:write",
        query=schemas.DeleteQuery, answer=schemas.RuleBody, key="optional", errors=_OF_A_RULE,
        on_invalid_input=limits.invalid_rule,
    ),
    Endpoint(
        "GET", "/admin/rules/history", limits.read_rule_history, "A rule's changes, newest first", "operator",
        "rules:read", query=schemas.HistoryQuery, answer=schemas.HistoryPage, errors=_OF_A_RULE,
        on_invalid_input=limits.invalid_rule,
    ),
    Endpoint(
        "GET", "/admin/rules/changes", limits.read_rule_changes, "The log of all changes, oldest first", "operator",
        "rules:read", query=schemas.ChangesQuery, answer=schemas.ChangesPage, errors=_OF_A_RULE,
        on_invalid_input=limits.invalid_rule,
    ),
    Endpoint(
        "POST", "/admin/rules/rollback", limits.roll_back_rule, "Make a rule what it was in `version`", "operator",
        "rules:write", body=schemas.Rollback, answer=schemas.RuleBody, key="optional", errors=_OF_A_RULE,
        on_invalid_input=limits.invalid_rule,
        note="As a new version; a deleted rule comes back. `expectedVersion`, if given, is the version you saw, that "
        "of the deletion included.",
    ),
    Endpoint(
        "POST", "/admin/rules/import", limits.import_rules, "Create and change many rules, all or none", "operator",
        "rules:write", body=schemas.ImportBody, answer=schemas.ImportAnswer, key="optional",
        errors=_OF_A_RULE, on_invalid_input=limits.invalid_rule, body_bytes_max=schemas.IMPORT_BYTES_MAX,
        deadline_seconds=schemas.IMPORT_SECONDS_MAX,
        note="Rules that are not named stay; what a rule leaves out is what a new rule would have. With `dryRun` "
        "nothing is changed and `changes` tells what would be, with the `digest` to send as `expectedDigest`: 409 if "
        "any rule has changed since. At most 10,000 rules, 8 MiB.",
    ),
    Endpoint(
        "GET", "/admin/limits", limits.get_limits_status, "How fresh and whole the limits of this node are",
        "operator", "status:read", answer=Mapping[str, Any], errors=frozenset({404}),
    ),
    Endpoint(
        "GET", "/admin/limits/subject", limits.peek_limit, "How one subject stands with its limit", "operator",
        "rules:read", query=schemas.SubjectQuery, answer=Standing, errors=_OF_A_CHECK | {404},
        on_invalid_input=limits.invalid_check, note="Nothing is taken. 404 where no rule limits the resource.",
    ),
    Endpoint(
        "POST", "/admin/limits/subject/reset", limits.reset_limit, "Forget what one subject has used", "operator",
        "rules:write", body=schemas.ResetBody, answer=Standing, errors=_OF_A_CHECK | {404},
        on_invalid_input=limits.invalid_check,
        key="optional",
        note="The answer is how it stands after. Recorded in the audit log. Other nodes, which may remember a refusal, "
        "hear of it with their next heartbeat, within a second.",
    ),
    Endpoint(
        "POST", "/v1/limits/check", limits.check_limit, "May a subject of this tenant go on?", "tenant",
        "limits:check", body=schemas.CheckBody, answer=Decision, errors=_OF_A_CHECK,
        on_invalid_input=limits.invalid_check,
        note="200 with the decision, allowed or not.",
    ),
    Endpoint(
        "POST", "/v1/limits/check-many", limits.check_limits, "Several checks: all are counted, or none", "tenant",
        "limits:check", body=schemas.CheckManyBody, answer=schemas.DecisionList, errors=_OF_A_CHECK,
        on_invalid_input=limits.invalid_check,
    ),
    Endpoint(
        "POST", "/v1/limits/renew", limits.renew_limit, "Go on holding what a concurrency rule granted", "tenant",
        "limits:check", body=schemas.HoldBody, answer=Decision, errors=_OF_A_CHECK,
        on_invalid_input=limits.invalid_check,
        note="For another window from now. A hold that was over is begun anew if there is room.",
    ),
    Endpoint(
        "POST", "/v1/limits/release", limits.release_limit, "Give back what a concurrency rule granted", "tenant",
        "limits:check", body=schemas.HoldBody, answer=schemas.Released, errors=_OF_A_CHECK,
        on_invalid_input=limits.invalid_check,
    ),
)  # fmt: skip

_GONE = frozenset({404})
HOOK = "/admin/webhooks/{endpoint_id}"

JOBS: Sequence[Endpoint] = (
    Endpoint(
        "GET", "/admin/jobs", jobs.list_jobs, "List jobs by sequence", "operator", "jobs:read",
        query=jobs.JobsQuery, answer=jobs.JobList, errors=_GONE,
    ),
    Endpoint(
        "GET", "/admin/jobs/stats", jobs.get_job_stats, "Jobs by state, reason and attempt; backlog; oldest age",
        "operator", "jobs:read", answer=jobs.StatsView, errors=_GONE,
    ),
    Endpoint(
        "GET", "/admin/jobs/streams", jobs.list_job_streams, "Blocked streams, longest waiting first", "operator",
        "jobs:read", query=jobs.LimitQuery, answer=jobs.StreamList, errors=_GONE,
    ),
    Endpoint(
        "GET", "/admin/jobs/breakers", jobs.list_job_breakers, "Job types whose breaker is open", "operator",
        "jobs:read", answer=jobs.BreakerList, errors=_GONE,
    ),
    Endpoint(
        "GET", "/admin/jobs/acts", jobs.list_job_acts, "What operators did to jobs, newest first", "operator",
        "jobs:read", query=jobs.ActsQuery, answer=jobs.ActList, errors=_GONE,
    ),
    Endpoint(
        "GET", "/admin/jobs/dead", jobs.list_dead_jobs, "Dead letters, newest first", "operator", "jobs:read",
        query=jobs.JobsQuery, answer=jobs.JobList, errors=_GONE,
    ),
    Endpoint(
        "GET", "/admin/jobs/{seq}", jobs.get_job, "One job or dead letter with its payload and trace", "operator",
        "jobs:read", answer=jobs.JobView, errors=_GONE,
    ),
    Endpoint(
        "POST", "/admin/jobs/retry", jobs.retry_jobs, "Run waiting or parked jobs now", "operator", "jobs:write",
        body=jobs.RetryJobs, answer=jobs.Count, key="kept", errors=_GONE,
    ),
    Endpoint(
        "POST", "/admin/jobs/release", jobs.release_jobs, "Let jobs pass their stream's failed head", "operator",
        "jobs:write", body=jobs.ReleaseJobs, answer=jobs.Count, key="kept", errors=_GONE,
        note="The head keeps its own retry; a later failure makes a new block. 404 if the stream is not blocked.",
    ),
    Endpoint(
        "POST", "/admin/jobs/park", jobs.park_jobs, "Stop jobs and the streams behind them", "operator", "jobs:write",
        body=jobs.TheseJobs, answer=jobs.Count, key="kept", errors=_GONE,
    ),
    Endpoint(
        "POST", "/admin/jobs/bury", jobs.bury_jobs, "Move jobs to the dead letters", "operator", "jobs:write",
        body=jobs.TheseJobs, answer=jobs.Count, key="kept", errors=_GONE,
    ),
    Endpoint(
        "POST", "/admin/jobs/replay", jobs.replay_jobs, "Enqueue dead letters again, oldest first", "operator",
        "jobs:write", body=jobs.TheseDead, answer=jobs.Count, key="kept", errors=_GONE,
        note="At most `limit` of those that match; repeat it for more, at the rate you want.",
    ),
    Endpoint(
        "POST", "/admin/jobs/discard", jobs.discard_jobs, "Forget dead letters for good", "operator", "jobs:write",
        body=jobs.TheseDead, answer=jobs.Count, key="kept", errors=_GONE,
    ),
)  # fmt: skip

WEBHOOKS: Sequence[Endpoint] = (
    Endpoint(
        "GET", "/admin/webhooks", webhooks.list_webhooks, "List the endpoints of webhooks", "operator",
        "webhooks:write", answer=webhooks.EndpointList, errors=_GONE,
    ),
    Endpoint(
        "POST", "/admin/webhooks", webhooks.create_webhook, "Add an endpoint", "operator", "webhooks:write",
        body=webhooks.NewEndpoint, answer=webhooks.EndpointView, status=201, key="kept", secret="secret",
        errors=_GONE,
        note="It gets the tenant's messages from now on, signed as Standard Webhooks. The secret is shown once.",
    ),
    Endpoint(
        "DELETE", HOOK, webhooks.delete_webhook, "Remove an endpoint and its log", "operator", "webhooks:write",
        query=Why, answer=webhooks.EndpointView, errors=_GONE,
    ),
    Endpoint(
        "POST", HOOK + "/enable", webhooks.enable_webhook, "Enable a disabled endpoint again", "operator",
        "webhooks:write", body=Why, answer=webhooks.EndpointView, key="kept", errors=_GONE,
    ),
    Endpoint(
        "POST", HOOK + "/disable", webhooks.disable_webhook, "Disable an endpoint; its jobs are parked", "operator",
        "webhooks:write", body=Why, answer=webhooks.EndpointView, key="kept", errors=_GONE,
        note="New jobs are parked too, and run in order when it is enabled again.",
    ),
    Endpoint(
        "POST", HOOK + "/test", webhooks.check_webhook, "Send a test delivery", "operator", "webhooks:write",
        body=Why, answer=jobs.Count, key="kept", errors=_GONE,
    ),
    Endpoint(
        "GET", HOOK + "/deliveries", webhooks.list_webhook_deliveries, "The last deliveries, newest first", "operator",
        "webhooks:write", query=jobs.LimitQuery, answer=webhooks.DeliveryList, errors=_GONE,
    ),
)  # fmt: skip

ALIASES: Mapping[str, str] = {"/healthz": "/health/live", "/readyz": "/health/ready"}
"""Conventional paths of probes -> ours."""

PROBES: Sequence[Endpoint] = (
    Endpoint("GET", "/health/live", probes.get_live, "Whether the process runs", "anybody", answer=Health),
    Endpoint(
        "GET", "/health/ready", probes.get_ready, "Whether this node can serve", "anybody", answer=Health,
        also={503: "It cannot."}, note="An admin key with status:read is told the state of each dependency.",
    ),
    Endpoint(
        "GET", "/health/admin", limits.get_admin_health, "Whether rules can be changed", "anybody",
        answer=Mapping[str, str], also={503: "They cannot; limiting goes on."}, errors=frozenset({404}),
        note="Looks once a second at most. An admin key with status:read is told what is unwell; `rules: stale` comes "
        "along while this node does not know whether it has every change.",
    ),
    Endpoint(
        "GET", "/metrics", probes.get_metrics, "Metrics for Prometheus", "operator", "status:read",
        media_type=probes.METRICS_TYPE,
        note="Open to anybody only if the setting `metrics_without_key` says so.",
    ),
)  # fmt: skip

GROUPS: Mapping[str, Sequence[Endpoint]] = {
    "Chats and members": CHATS,
    "Messages and tokens": MESSAGES,
    "Operators": ADMIN,
    "Who is cut off": CUT_OFF,
    "Limits": RULES,
    "Jobs": JOBS,
    "Webhooks": WEBHOOKS,
    "Probes": PROBES,
}
ENDPOINTS: Sequence[Endpoint] = tuple(row for rows in GROUPS.values() for row in rows)

PAGES: Sequence[WebPage] = (
    WebPage("/openapi.json", "application/json", openapi_json),
    WebPage(
        "/docs", "text/html; charset=utf-8", lambda _: html_page(GROUPS),
        csp="default-src 'none'; style-src 'self'; frame-ancestors 'none'",
    ),
    WebPage("/docs/style.css", "text/css; charset=utf-8", lambda _: STYLE),
)  # fmt: skip
