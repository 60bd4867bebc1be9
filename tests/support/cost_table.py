"""The most expensive inputs found, for every endpoint and every frame. See
CONTRIBUTING.md, "A new endpoint or frame".

Every endpoint is also asked with what is expensive anywhere (``test_cost.py``): long
queries, paths and heads, and bodies up to their bound. A row says what is expensive
*here*: a valid body or query, as large as it may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Row(NamedTuple):
    """``{chat}`` in a path or a query is a chat with all the members and messages a
    page can hold.
    """

    body: Any = None
    query: str = ""
    path: Mapping[str, str] = {}
    milliseconds_max: float = 25.0


def many(name: str, number: int) -> list[str]:
    return [f"{name}-{n}" for n in range(number)]


RULE = {
    "tenantID": "t" * 60,
    "resource": "r" * 250,
    "algorithm": "token_bucket",
    "limit": 10,
    "window": "60s",
}
SEQS = list(range(2**53 - 1001, 2**53 - 1))
WHY = {"reason": "€" * 500}
CHECK = {"resource": "send", "subject": "s" * 250}

ENDPOINTS: Mapping[str, Row] = {
    "create_chat": Row(body={"name": "n" * 100, "members": many("member", 89)}),
    "list_chats": Row(query="limit=200"),
    "get_chat": Row(),
    "rename_chat": Row(body={"name": "€" * 100}),
    "list_members": Row(),
    "add_member": Row(body={"user_id": "u" * 64, "role": "admin"}),
    "change_role": Row(body={"role": "admin"}),
    "remove_member": Row(),
    "list_bans": Row(),
    "ban_user": Row(body={"user_id": "u" * 64}),
    "unban_user": Row(),
    "mute_member": Row(body={"user_id": "u" * 64}),
    "unmute_member": Row(),
    "get_presence": Row(),
    "list_messages": Row(query="limit=500&before=9999"),
    "send_message": Row(body={"content": "€" * 1_300}),
    "redact_message": Row(path={"sequence": "400"}),
    "get_status": Row(path={"sequence": "401"}),
    "mint_token": Row(body={"user_id": "u" * 64, "ttl_seconds": 3600}),
    "create_chat_completion": Row(
        body={"model": "none", "messages": [{"role": "user", "content": "€" * 1_300_000}]}
    ),
    "list_models": Row(),
    "get_model": Row(),
    "create_response": Row(
        body={"model": "none", "input": [{"role": "user", "content": "€" * 110}] * 11_000}
    ),
    "get_response": Row(query="stream=true&starting_after=9007199254740991"),
    "cancel_response": Row(),
    "delete_response": Row(),
    "create_reply": Row(
        body={"model": "none", "messages": [{"role": "user", "content": "x" * 80}] * 33_000}
    ),
    "read_reply_events": Row(query="last_event_id=1700000000000-1&ticket=" + "a." * 3_000),
    "cancel_reply": Row(),
    "upgrade_needed": Row(),
    "inspect_chat": Row(),
    "halt_chat": Row(body=WHY),
    "recover_chat": Row(body=WHY),
    "redact_any": Row(body={**WHY, "sequence": 402}),
    "list_chat_bans": Row(),
    "ban_from_chat": Row(body={**WHY, "user_id": "u" * 64}),
    "unban_from_chat": Row(body={**WHY, "user_id": "u" * 64}),
    "mute_in_chat": Row(body={**WHY, "user_id": "u" * 64}),
    "unmute_in_chat": Row(body={**WHY, "user_id": "u" * 64}),
    "retain_from": Row(body={**WHY, "first_sequence": 2}),
    "erase_user": Row(body={**WHY, "user_id": "u" * 64}),
    "read_audit": Row(query="limit=500"),
    "list_keys": Row(),
    "issue_key": Row(body={**WHY, "kind": "tenant", "label": "l" * 100, "tenant": "t" * 60}),
    "revoke_key": Row(query="reason=" + "%E2%82%AC" * 500),
    "take_backup": Row(body=WHY),
    "get_backup_run": Row(),
    "get_operator_status": Row(),
    "list_halted_chats": Row(query="limit=500"),
    "list_alerts": Row(),
    "list_objectives": Row(),
    "silence_alert": Row(body={"alert": "HoldfastJobsOld", "seconds": 60, **WHY}),
    "end_silence": Row(body={"alert": "HoldfastJobsOld", **WHY}),
    "check_sinks": Row(body={"sinks": many("s", 100), **WHY}),
    "get_cluster": Row(),
    "raise_epochs": Row(body={"reason": "test"}),
    "read_rules": Row(query="limit=500"),
    "create_rule": Row(body={**RULE, "reason": "€" * 500}),
    "update_rule": Row(body={**RULE, "expectedVersion": 1}),
    "delete_rule": Row(query=f"tenantID={'t' * 60}&resource={'r' * 250}&expectedVersion=1"),
    "read_rule_history": Row(query="tenantID=*&resource=send:user&limit=500"),
    "read_rule_changes": Row(query="limit=500"),
    "roll_back_rule": Row(body={"tenantID": "t", "resource": "r", "version": 1}),
    "import_rules": Row(
        body={"rules": [{**RULE, "resource": f"r-{n}"} for n in range(10_000)], "dryRun": True}
    ),
    "get_limits_status": Row(),
    "peek_limit": Row(query=f"tenantID={'t' * 60}&resource=send:user&subject={'s' * 1024}"),
    "reset_limit": Row(
        body={**WHY, "tenantID": "t" * 60, "resource": "send:user", "subject": "s" * 1024}
    ),
    "check_limit": Row(body=CHECK),
    "check_limits": Row(body={"checks": [{**CHECK, "subject": f"s-{n}"} for n in range(100)]}),
    "list_running_replies": Row(query="limit=1000&tenant=acme&state=waiting"),
    "get_reply_summary": Row(),
    "cancel_any_reply": Row(body=WHY),
    "read_usage": Row(query="limit=1000&since=2000-01-01"),
    "charge_limit": Row(body={**CHECK, "amount": 10**9}),
    "renew_limit": Row(body={**CHECK, "hold": "h" * 64}),
    "release_limit": Row(body={**CHECK, "hold": "h" * 64}),
    "list_jobs": Row(query="limit=1000"),
    "get_job_stats": Row(),
    "list_job_streams": Row(query="limit=1000"),
    "list_job_breakers": Row(),
    "list_job_acts": Row(query="limit=1000"),
    "list_dead_jobs": Row(query="limit=1000"),
    "list_dead_letters": Row(query="limit=1000"),
    "get_dead_letter": Row(),
    "replay_dead_letters": Row(body={**WHY, "numbers": SEQS}),
    "discard_dead_letters": Row(body={**WHY, "numbers": SEQS}),
    "get_job": Row(),
    "retry_jobs": Row(body={**WHY, "seqs": SEQS}),
    "release_jobs": Row(body={**WHY, "stream": "s" * 200, "seqs": SEQS}),
    "park_jobs": Row(body={**WHY, "seqs": SEQS}),
    "bury_jobs": Row(body={**WHY, "seqs": SEQS}),
    "replay_jobs": Row(body={**WHY, "seqs": SEQS}),
    "discard_jobs": Row(body={**WHY, "seqs": SEQS}),
    "list_revocations": Row(query="limit=500&tenant=acme&user_id=nobody"),
    "add_revocation": Row(body={**WHY, "kind": "user", "tenant": "t" * 60, "user_id": "u" * 64}),
    "lift_revocation": Row(query="reason=" + "%E2%82%AC" * 500),
    "disconnect_user": Row(body={**WHY, "tenant": "t" * 60, "user_id": "u" * 64}),
    "list_webhooks": Row(),
    "create_webhook": Row(body={**WHY, "url": "https://example.com/" + "p" * 1_900}),
    "delete_webhook": Row(query="reason=" + "%E2%82%AC" * 500),
    "enable_webhook": Row(body=WHY),
    "disable_webhook": Row(body=WHY),
    "check_webhook": Row(body=WHY),
    "list_webhook_deliveries": Row(query="limit=1000"),
    "get_live": Row(),
    "get_ready": Row(),
    "get_admin_health": Row(),
    "get_metrics": Row(),
}
"""By the name of the endpoint. A request without a credential may take 2 ms anywhere.
"""

FRAMES: Mapping[str, Any] = {
    "authenticate": {"token": "a." * 16_000 + "a", "device_id": "d"},
    "send_message": {"client_message_id": "c", "chat_id": "{chat}", "content": "€" * 20_000},
    "ack": {"chat_id": "{chat}", "epoch": 1, "sequence": 1},
    "resume": {"cursors": {"{chat}": [1, 0], **{f"chat_{n}": [1, 0] for n in range(499)}}},
    "sync_request": {"chat_id": "{chat}", "epoch": 1, "after_sequence": 0, "limit": 200},
    "heartbeat_ack": {},
    "typing_start": {"chat_id": "{chat}"},
    "typing_stop": {"chat_id": "{chat}"},
    "read": {"chat_id": "{chat}", "sequence": 1},
}
"""By the type of the frame: its payload."""
