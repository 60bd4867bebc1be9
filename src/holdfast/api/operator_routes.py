"""The part of the table for operators, and the checks of other services.

The rows of one subject stand together, whoever may call them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.api import (
    admin,
    alerts,
    dead_letters,
    jobs,
    limits,
    probes,
    reply_admin,
    revocations,
    webhooks,
)
from holdfast.api import limit_schemas as schemas
from holdfast.api.deps import Backup, BackupRun, ClusterStatus, NodeStatus
from holdfast.api.endpoint import Endpoint
from holdfast.api.schemas import (
    AuditQuery,
    BanList,
    ChangeAnswer,
    EpochsRaised,
    ErasePerson,
    HaltedQuery,
    IssuedKey,
    KeyList,
    KeyView,
    NewKey,
    RedactOne,
    RestrictOne,
    RetainFrom,
    RevokeKey,
    Why,
)
from holdfast.ingest.erasure import Erasure
from holdfast.limits.limiter.decisions import Standing
from holdfast.limits.rules import Decision
from holdfast.store.contract import AuditPage, HaltedChats, Inspection
from holdfast.streaming.summary import ReplySummary
from holdfast.telemetry.notices import Silence

OPERATED = "/admin/chats/{chat_id}"

ADMIN: Sequence[Endpoint] = (
    Endpoint(
        "GET", OPERATED, admin.inspect_chat, "A chat's counter, head, count and gaps", "operator",
        "chats:read", answer=Inspection,
    ),
    Endpoint(
        "POST", OPERATED + "/halt", admin.halt_chat, "Refuse sends to a chat", "operator",
        "chats:write", body=Why, answer=ChangeAnswer, key="optional",
    ),
    Endpoint(
        "POST", OPERATED + "/recover", admin.recover_chat,
        "Repair a chat's numbering and resume it", "operator", "chats:write", body=Why,
        answer=ChangeAnswer, key="optional",
        note="Raises the chat's epoch: clients drop their copy and read it again.",
    ),
    Endpoint(
        "POST", OPERATED + "/redact", admin.redact_any, "Redact any message", "operator",
        "chats:write", body=RedactOne, answer=ChangeAnswer, key="optional",
    ),
    Endpoint(
        "GET", OPERATED + "/bans", admin.list_chat_bans, "Who is banned from a chat", "operator",
        "chats:read", answer=BanList,
        note="And who is muted in it, those who have left included.",
    ),
    Endpoint(
        "POST", OPERATED + "/ban", admin.ban_from_chat, "Ban somebody from a chat", "operator",
        "chats:write", body=RestrictOne, answer=ChangeAnswer, key="optional",
        note="A member is removed; nobody can add them again until the ban is lifted. An owner "
        "cannot be banned.",
    ),
    Endpoint(
        "POST", OPERATED + "/unban", admin.unban_from_chat, "Lift a ban from a chat", "operator",
        "chats:write", body=RestrictOne, answer=ChangeAnswer, key="optional",
    ),
    Endpoint(
        "POST", OPERATED + "/mute", admin.mute_in_chat, "Mute a member of a chat", "operator",
        "chats:write", body=RestrictOne, answer=ChangeAnswer, key="optional",
        note="An owner cannot be muted.",
    ),
    Endpoint(
        "POST", OPERATED + "/unmute", admin.unmute_in_chat, "Lift a mute in a chat", "operator",
        "chats:write", body=RestrictOne, answer=ChangeAnswer, key="optional",
    ),
    Endpoint(
        "POST", OPERATED + "/retain", admin.retain_from, "Delete a chat's oldest messages",
        "operator", "chats:write", body=RetainFrom, answer=ChangeAnswer, key="kept",
        note="Those before `first_sequence`, for good; numbering goes on. `chat.first_sequence` "
        "in the answer is how far it came in its time: repeat, under another key, until it is "
        "there.",
    ),
    Endpoint(
        "POST", "/admin/erase", admin.erase_user, "Erase a person", "operator", "chats:write",
        body=ErasePerson, answer=Erasure, key="kept",
        note="The content of every text of a user is deleted for good, and so are memberships of "
        "groups, devices and kept answers. As far as its time allows: repeat with `after` set to "
        "`next` until `done`.",
    ),
    Endpoint(
        "POST", "/admin/raise-epochs", admin.raise_epochs, "Let every client read its chats again",
        "operator", "chats:write", body=Why, answer=EpochsRaised, key="kept",
        note="For a cluster whose PostgreSQL was restored by a tool that leaves no trace. A "
        "failover, a promotion and a restore to another server are noticed without it.",
    ),
    Endpoint(
        "GET", "/admin/audit", admin.read_audit, "The audit log, oldest first", "operator",
        "audit:read", query=AuditQuery, answer=AuditPage,
    ),
    Endpoint(
        "GET", "/admin/keys", admin.list_keys, "List the API keys", "operator", "keys:write",
        answer=KeyList,
    ),
    Endpoint(
        "POST", "/admin/keys", admin.issue_key, "Issue an API key", "operator", "keys:write",
        body=NewKey, answer=IssuedKey, status=201, key="kept", secret="secret",
        note="An admin key can hand out only scopes it carries itself.",
    ),
    Endpoint(
        "DELETE", "/admin/keys/{key_id}", admin.revoke_key, "Revoke an API key", "operator",
        "keys:write", query=RevokeKey, answer=KeyView,
        note="403 for the last key that can make keys, unless `force` is true.",
    ),
    Endpoint(
        "POST", "/admin/backup", admin.take_backup, "Take a backup on the server", "operator",
        "backup", body=Why, answer=Backup, key="kept",
        note="Of all files but the secrets, while serving. The answer comes when it is complete "
        "and checked. 400 in a cluster: its backups are those of PostgreSQL.",
    ),
    Endpoint(
        "GET", "/admin/backup", admin.get_backup_run,
        "How far the backup that is being taken has come", "operator", "backup", answer=BackupRun,
    ),
    Endpoint(
        "GET", "/admin/halted", admin.list_halted_chats, "Chats that take no messages, and why",
        "operator", "chats:read", query=HaltedQuery, answer=HaltedChats,
    ),
    Endpoint(
        "GET", "/admin/alerts", alerts.list_alerts, "The alerts of this node", "operator",
        "status:read", answer=alerts.AlertList,
        note="Judged over the node's own metrics; those of a silence are shown too.",
    ),
    Endpoint(
        "GET", "/admin/objectives", alerts.list_objectives,
        "The objectives over this node's last hour", "operator", "status:read",
        answer=alerts.ObjectiveList,
        note="`value` null: nothing happened that it could be measured by.",
    ),
    Endpoint(
        "POST", "/admin/alerts/silence", alerts.silence_alert, "Do not report an alert for a while",
        "operator", "alerts:write", body=alerts.SilenceAlert, answer=Silence, key="kept",
        note="No node reports it within a few seconds. It stays visible.",
    ),
    Endpoint(
        "POST", "/admin/alerts/unsilence", alerts.end_silence, "Report an alert again",
        "operator", "alerts:write", body=alerts.EndSilence, answer=Silence, key="kept",
        errors=frozenset({404}),
    ),
    Endpoint(
        "POST", "/admin/alerts/test", alerts.check_sinks, "Send a test to the sinks of alerts",
        "operator", "alerts:write", body=alerts.ChooseSinks, answer=alerts.SinkTests,
        key="kept", deadline_seconds=alerts.TEST_SECONDS_MAX,
    ),
    Endpoint(
        "GET", "/admin/status", probes.get_operator_status, "The state of this node", "operator",
        "status:read", answer=NodeStatus,
    ),
    Endpoint(
        "GET", "/admin/cluster", probes.get_cluster, "All nodes, and what they share", "operator",
        "status:read", answer=ClusterStatus,
        note="As this node sees them; a node that is alone shows itself. `problems` says what an "
        "operator should look at.",
    ),
)  # fmt: skip

CUT_OFF: Sequence[Endpoint] = (
    Endpoint(
        "GET", "/admin/revocations", revocations.list_revocations, "Who is cut off, oldest first",
        "operator", "access:write", query=revocations.RevocationsQuery,
        answer=revocations.RevocationPage,
        note="Revoked tokens, users, devices and tenants, and users banned or muted in a whole "
        "tenant. Bans and mutes of one chat are the chat's.",
    ),
    Endpoint(
        "POST", "/admin/revocations", revocations.add_revocation, "Cut somebody off", "operator",
        "access:write", body=revocations.NewRevocation, answer=revocations.RevocationView,
        status=201, key="kept",
        note="It counts when the answer comes; sockets it concerns are closed (`unauthorized`, "
        "4502) within a second. A second one of the same thing is merged with the first. A ban "
        "and a mute last until they are lifted; the others end when every token they concern has "
        "expired.",
    ),
    Endpoint(
        "DELETE", "/admin/revocations/{number}", revocations.lift_revocation, "Undo it", "operator",
        "access:write", query=Why, answer=revocations.RevocationView,
        note="404 if there is none of this number.",
    ),
    Endpoint(
        "POST", "/admin/disconnect", revocations.disconnect_user,
        "Close a user's or a device's sockets", "operator", "access:write",
        body=revocations.Disconnect, answer=revocations.Disconnected, key="kept",
        note="They may come back at once; to keep them out, revoke or ban first. `closed` 0: "
        "nobody matched.",
    ),
)  # fmt: skip

ANY_REPLIES: Sequence[Endpoint] = (
    Endpoint(
        "GET", "/admin/replies", reply_admin.list_running_replies,
        "The AI replies that wait or run on this node", "operator", "replies:read",
        query=reply_admin.RepliesQuery, answer=reply_admin.ReplyPage,
        note="Whose they are, their model, state, age and place in the queue; never text. Ask "
        "each of `nodes` for its own.",
    ),
    Endpoint(
        "GET", "/admin/replies/{reply_id}", reply_admin.get_reply_summary, "One AI reply",
        "operator", "replies:read", answer=ReplySummary,
        note="Of any node, if it can be resumed; else only of this one. Never text.",
    ),
    Endpoint(
        "POST", "/admin/replies/{reply_id}/cancel", reply_admin.cancel_any_reply,
        "Cancel an AI reply", "operator", "replies:write", body=Why,
        answer=reply_admin.ReplyCancelled, key="kept",
        note="Its readers get the error `cancelled`. A reply of another node is cancelled there, "
        "within a second.",
    ),
    Endpoint(
        "GET", "/admin/usage", reply_admin.read_usage,
        "Tokens by day, tenant, user, model and provider", "operator", "usage:read",
        query=reply_admin.UsageRowsQuery, answer=reply_admin.UsagePage,
        note="Of the replies that this node made: add up what each node answers.",
    ),
)  # fmt: skip

_OF_A_RULE = frozenset({404, 409, 422})
_OF_A_CHECK = frozenset({404, 422})

RULES: Sequence[Endpoint] = (
    Endpoint(
        "GET", "/admin/rules", limits.read_rules, "Read one rule, or list rules in pages",
        "operator", "rules:read", query=schemas.RulesQuery, answer=Mapping[str, Any],
        errors=_OF_A_RULE, on_invalid_input=limits.invalid_rule,
        note="With `tenantID` and `resource` the rule itself; otherwise `{rules, next}`; the "
        "`next` of a page is the `after` of the one after it.",
    ),
    Endpoint(
        "POST", "/admin/rules", limits.create_rule, "Create a rule", "operator", "rules:write",
        body=schemas.NewRule, answer=schemas.RuleBody, status=201, key="optional",
        errors=_OF_A_RULE, on_invalid_input=limits.invalid_rule,
        note="What the fields mean is in the guide to limits. 409 if it exists.",
    ),
    Endpoint(
        "PUT", "/admin/rules", limits.update_rule, "Change fields of a rule", "operator",
        "rules:write", body=schemas.RuleUpdate, answer=schemas.RuleBody, key="optional",
        errors=_OF_A_RULE, on_invalid_input=limits.invalid_rule,
        note="`expectedVersion` is the version you saw; 409 with `currentVersion` and the rule if "
        "it is not the last. What is not named stays; `burstSize` null unsets it, and so does an "
        "algorithm that has none.",
    ),
    Endpoint(
        "DELETE", "/admin/rules", limits.delete_rule, "Delete a rule", "operator", "rules:write",
        query=schemas.DeleteQuery, answer=schemas.RuleBody, key="optional", errors=_OF_A_RULE,
        on_invalid_input=limits.invalid_rule,
    ),
    Endpoint(
        "GET", "/admin/rules/history", limits.read_rule_history, "A rule's changes, newest first",
        "operator", "rules:read", query=schemas.HistoryQuery, answer=schemas.HistoryPage,
        errors=_OF_A_RULE, on_invalid_input=limits.invalid_rule,
    ),
    Endpoint(
        "GET", "/admin/rules/changes", limits.read_rule_changes,
        "The log of all changes, oldest first", "operator", "rules:read",
        query=schemas.ChangesQuery, answer=schemas.ChangesPage, errors=_OF_A_RULE,
        on_invalid_input=limits.invalid_rule,
    ),
    Endpoint(
        "POST", "/admin/rules/rollback", limits.roll_back_rule,
        "Make a rule what it was in `version`", "operator", "rules:write", body=schemas.Rollback,
        answer=schemas.RuleBody, key="optional", errors=_OF_A_RULE,
        on_invalid_input=limits.invalid_rule,
        note="As a new version; a deleted rule comes back. `expectedVersion`, if given, is the "
        "version you saw, that of the deletion included.",
    ),
    Endpoint(
        "POST", "/admin/rules/import", limits.import_rules,
        "Create and change many rules, all or none", "operator", "rules:write",
        body=schemas.ImportBody, answer=schemas.ImportAnswer, key="optional", errors=_OF_A_RULE,
        on_invalid_input=limits.invalid_rule, body_bytes_max=schemas.IMPORT_BYTES_MAX,
        deadline_seconds=schemas.IMPORT_SECONDS_MAX,
        note="Rules that are not named stay; what a rule leaves out is what a new rule would "
        "have. With `dryRun` nothing is changed and `changes` is what would be changed, with the "
        "`digest` to send as `expectedDigest`: 409 if any rule has changed since. At most 10,000 "
        "rules, 8 MiB.",
    ),
    Endpoint(
        "GET", "/admin/limits", limits.get_limits_status,
        "How fresh and whole the limits of this node are", "operator", "status:read",
        answer=Mapping[str, Any], errors=frozenset({404}),
    ),
    Endpoint(
        "GET", "/admin/limits/subject", limits.peek_limit, "How one subject stands with its limit",
        "operator", "rules:read", query=schemas.SubjectQuery, answer=Standing,
        errors=_OF_A_CHECK | {404}, on_invalid_input=limits.invalid_check,
        note="Nothing is taken. 404 where no rule limits the resource.",
    ),
    Endpoint(
        "POST", "/admin/limits/subject/reset", limits.reset_limit,
        "Forget what one subject has used", "operator", "rules:write", body=schemas.ResetBody,
        answer=Standing, errors=_OF_A_CHECK | {404}, on_invalid_input=limits.invalid_check,
        key="optional",
        note="The answer is how it stands after. Recorded in the audit log. Other nodes, which "
        "may remember a refusal, hear of it with their next heartbeat, within a second.",
    ),
    Endpoint(
        "POST", "/v1/limits/check", limits.check_limit, "May a subject of this tenant go on?",
        "tenant", "limits:check", body=schemas.CheckBody, answer=Decision, errors=_OF_A_CHECK,
        on_invalid_input=limits.invalid_check,
        note="200 with the decision, allowed or not.",
    ),
    Endpoint(
        "POST", "/v1/limits/check-many", limits.check_limits,
        "Several checks: all are counted, or none", "tenant", "limits:check",
        body=schemas.CheckManyBody, answer=schemas.DecisionList, errors=_OF_A_CHECK,
        on_invalid_input=limits.invalid_check,
    ),
    Endpoint(
        "POST", "/v1/limits/charge", limits.charge_limit, "Count what a subject has used",
        "tenant", "limits:check", body=schemas.ChargeBody, answer=schemas.Charged, key="kept",
        errors=_OF_A_CHECK, on_invalid_input=limits.invalid_check,
        note="For what is known only afterwards, such as the tokens of a model. Nothing is "
        "refused: beyond the limit, checks are, until the excess has drained. A negative "
        "`amount` gives back, down to nothing used. Not by concurrency rules.",
    ),
    Endpoint(
        "POST", "/v1/limits/renew", limits.renew_limit,
        "Go on holding what a concurrency rule granted", "tenant", "limits:check",
        body=schemas.HoldBody, answer=Decision, errors=_OF_A_CHECK,
        on_invalid_input=limits.invalid_check,
        note="For another window from now. A hold that has ended starts again if there is room.",
    ),
    Endpoint(
        "POST", "/v1/limits/release", limits.release_limit,
        "Give back what a concurrency rule granted", "tenant", "limits:check",
        body=schemas.HoldBody, answer=schemas.Released, errors=_OF_A_CHECK,
        on_invalid_input=limits.invalid_check,
    ),
)  # fmt: skip

_GONE = frozenset({404})

DEAD_LETTERS: Sequence[Endpoint] = (
    Endpoint(
        "GET", "/admin/dead-letters", dead_letters.list_dead_letters,
        "Events that could not be delivered, newest first", "operator", "chats:read",
        query=dead_letters.LettersQuery, answer=dead_letters.LetterPage,
        note="Those of jobs are at /admin/jobs/dead.",
    ),
    Endpoint(
        "GET", "/admin/dead-letters/{number}", dead_letters.get_dead_letter,
        "One dead letter with its data", "operator", "chats:read",
        answer=dead_letters.LetterView, errors=_GONE,
    ),
    Endpoint(
        "POST", "/admin/dead-letters/replay", dead_letters.replay_dead_letters,
        "Make the sessions of their chats compare with the store", "operator", "chats:write",
        body=dead_letters.TheseLetters, answer=jobs.Count, key="kept", errors=_GONE,
        note="On every node; then the letters are gone. A client that lacks something is sent a "
        "resync.",
    ),
    Endpoint(
        "POST", "/admin/dead-letters/discard", dead_letters.discard_dead_letters,
        "Forget dead letters for good", "operator", "chats:write", body=dead_letters.TheseLetters,
        answer=jobs.Count, key="kept", errors=_GONE,
    ),
)  # fmt: skip
HOOK = "/admin/webhooks/{endpoint_id}"

JOBS: Sequence[Endpoint] = (
    Endpoint(
        "GET", "/admin/jobs", jobs.list_jobs, "List jobs by sequence", "operator", "jobs:read",
        query=jobs.JobsQuery, answer=jobs.JobList, errors=_GONE,
    ),
    Endpoint(
        "GET", "/admin/jobs/stats", jobs.get_job_stats,
        "Jobs by state, reason and attempt; backlog; oldest age", "operator", "jobs:read",
        answer=jobs.StatsView, errors=_GONE,
    ),
    Endpoint(
        "GET", "/admin/jobs/streams", jobs.list_job_streams,
        "Blocked streams, longest waiting first", "operator", "jobs:read", query=jobs.LimitQuery,
        answer=jobs.StreamList, errors=_GONE,
    ),
    Endpoint(
        "GET", "/admin/jobs/breakers", jobs.list_job_breakers, "Job types whose breaker is open",
        "operator", "jobs:read", answer=jobs.BreakerList, errors=_GONE,
    ),
    Endpoint(
        "GET", "/admin/jobs/acts", jobs.list_job_acts, "What operators did to jobs, newest first",
        "operator", "jobs:read", query=jobs.ActsQuery, answer=jobs.ActList, errors=_GONE,
    ),
    Endpoint(
        "GET", "/admin/jobs/dead", jobs.list_dead_jobs, "Dead letters, newest first", "operator",
        "jobs:read", query=jobs.JobsQuery, answer=jobs.JobList, errors=_GONE,
    ),
    Endpoint(
        "GET", "/admin/jobs/{seq}", jobs.get_job,
        "One job or dead letter with its payload and trace", "operator", "jobs:read",
        answer=jobs.JobView, errors=_GONE,
    ),
    Endpoint(
        "POST", "/admin/jobs/retry", jobs.retry_jobs, "Run waiting or parked jobs now", "operator",
        "jobs:write", body=jobs.RetryJobs, answer=jobs.Count, key="kept", errors=_GONE,
    ),
    Endpoint(
        "POST", "/admin/jobs/release", jobs.release_jobs,
        "Let jobs pass their stream's failed head", "operator", "jobs:write", body=jobs.ReleaseJobs,
        answer=jobs.Count, key="kept", errors=_GONE,
        note="The head keeps its own retry; a later failure makes a new block. 404 if the stream "
        "is not blocked.",
    ),
    Endpoint(
        "POST", "/admin/jobs/park", jobs.park_jobs, "Stop jobs and the streams behind them",
        "operator", "jobs:write", body=jobs.TheseJobs, answer=jobs.Count, key="kept", errors=_GONE,
    ),
    Endpoint(
        "POST", "/admin/jobs/bury", jobs.bury_jobs, "Move jobs to the dead letters", "operator",
        "jobs:write", body=jobs.TheseJobs, answer=jobs.Count, key="kept", errors=_GONE,
    ),
    Endpoint(
        "POST", "/admin/jobs/replay", jobs.replay_jobs, "Enqueue dead letters again, oldest first",
        "operator", "jobs:write", body=jobs.TheseDead, answer=jobs.Count, key="kept", errors=_GONE,
        note="At most `limit` of those that match; repeat it for more, at the rate you want.",
    ),
    Endpoint(
        "POST", "/admin/jobs/discard", jobs.discard_jobs, "Forget dead letters for good",
        "operator", "jobs:write", body=jobs.TheseDead, answer=jobs.Count, key="kept", errors=_GONE,
    ),
)  # fmt: skip

WEBHOOKS: Sequence[Endpoint] = (
    Endpoint(
        "GET", "/admin/webhooks", webhooks.list_webhooks, "List the endpoints of webhooks",
        "operator", "webhooks:write", answer=webhooks.EndpointList, errors=_GONE,
    ),
    Endpoint(
        "POST", "/admin/webhooks", webhooks.create_webhook, "Add an endpoint", "operator",
        "webhooks:write", body=webhooks.NewEndpoint, answer=webhooks.EndpointView, status=201,
        key="kept", secret="secret", errors=_GONE,
        note="It gets the tenant's messages from now on, signed as Standard Webhooks. The secret "
        "is shown once.",
    ),
    Endpoint(
        "DELETE", HOOK, webhooks.delete_webhook, "Remove an endpoint and its log", "operator",
        "webhooks:write", query=Why, answer=webhooks.EndpointView, errors=_GONE,
    ),
    Endpoint(
        "POST", HOOK + "/enable", webhooks.enable_webhook, "Enable a disabled endpoint again",
        "operator", "webhooks:write", body=Why, answer=webhooks.EndpointView, key="kept",
        errors=_GONE,
    ),
    Endpoint(
        "POST", HOOK + "/disable", webhooks.disable_webhook,
        "Disable an endpoint; its jobs are parked", "operator", "webhooks:write", body=Why,
        answer=webhooks.EndpointView, key="kept", errors=_GONE,
        note="New jobs are parked too, and run in order when it is enabled again.",
    ),
    Endpoint(
        "POST", HOOK + "/test", webhooks.check_webhook, "Send a test delivery", "operator",
        "webhooks:write", body=Why, answer=jobs.Count, key="kept", errors=_GONE,
    ),
    Endpoint(
        "GET", HOOK + "/deliveries", webhooks.list_webhook_deliveries,
        "The last deliveries, newest first", "operator", "webhooks:write", query=jobs.LimitQuery,
        answer=webhooks.DeliveryList, errors=_GONE,
    ),
)  # fmt: skip
