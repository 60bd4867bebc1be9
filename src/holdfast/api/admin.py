"""Operators' endpoints: an admin key, a scope, a reason, and a record in the audit log.

An operator belongs to no tenant; an act on a chat is recorded under the chat's tenant.
"""

from __future__ import annotations

import msgspec

from holdfast.access.contract import ApiKey
from holdfast.access.principal import ADMIN_SCOPES
from holdfast.api.chats import bans_of, commit
from holdfast.api.deps import ApiDeps, BackupRun
from holdfast.api.endpoint import Answer, Call
from holdfast.api.schemas import (
    AuditQuery,
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
    token_of,
)
from holdfast.clock import timestamp
from holdfast.drivers.cluster import backups_are_those_of_postgres
from holdfast.errors import Forbidden, InvalidMessage, OutcomeUnknown, ServerBusy, Unavailable
from holdfast.message import User
from holdfast.store.commands import (
    ChangeBan,
    ChangeMute,
    CommandContext,
    HaltChat,
    RecoverChat,
    Redact,
    Retain,
)


def _act(deps: ApiDeps, call: Call, reason: str, tenant: str = "") -> CommandContext:
    return CommandContext(
        actor=User(tenant, call.principal.user_id),
        at=timestamp(deps.clock.now()),
        message_id=deps.ids.new("msg_"),
        operator=True,
        reason=reason,
        key=call.key,
        fingerprint=call.fingerprint,
        node=deps.node_id,
    )


async def record(
    deps: ApiDeps,
    call: Call,
    action: str,
    target: str,
    reason: str,
    tenant: str = "",
    details: str = "",
) -> None:
    """Write to the audit log, before the act: there is no act without its record."""
    act = _act(deps, call, reason, tenant)
    try:
        await call.done_in_time(deps.records.record(act, action, target, details))
    except OutcomeUnknown as error:
        raise Unavailable(f"nothing was done, for want of a record: {error.message}") from None


def _halfway(deps: ApiDeps, call: Call) -> float:
    """After this time no further step begins; the last has as long again to end."""
    return call.deadline - deps.settings.request_seconds_max / 2


async def _act_on_chat(deps: ApiDeps, call: Call, reason: str) -> CommandContext:
    chat = await deps.history.ask(lambda store: store.chat(call.path["chat_id"]), call.deadline)
    return _act(deps, call, reason, chat.tenant)


async def inspect_chat(deps: ApiDeps, call: Call) -> Answer:
    """It reads the whole chat, so it does not share the users' breaker for reads."""
    return Answer(await call.in_time(deps.chats.inspect(call.path["chat_id"])))


async def halt_chat(deps: ApiDeps, call: Call) -> Answer:
    body: Why = call.body
    return await commit(
        deps, call, HaltChat(await _act_on_chat(deps, call, body.reason), call.path["chat_id"])
    )


async def recover_chat(deps: ApiDeps, call: Call) -> Answer:
    body: Why = call.body
    return await commit(
        deps, call, RecoverChat(await _act_on_chat(deps, call, body.reason), call.path["chat_id"])
    )


async def redact_any(deps: ApiDeps, call: Call) -> Answer:
    body: RedactOne = call.body
    act = await _act_on_chat(deps, call, body.reason)
    return await commit(deps, call, Redact(act, call.path["chat_id"], body.sequence))


async def ban_from_chat(deps: ApiDeps, call: Call) -> Answer:
    return await _restrict(deps, call, ChangeBan, restricted=True)


async def unban_from_chat(deps: ApiDeps, call: Call) -> Answer:
    return await _restrict(deps, call, ChangeBan, restricted=False)


async def mute_in_chat(deps: ApiDeps, call: Call) -> Answer:
    return await _restrict(deps, call, ChangeMute, restricted=True)


async def unmute_in_chat(deps: ApiDeps, call: Call) -> Answer:
    return await _restrict(deps, call, ChangeMute, restricted=False)


async def _restrict(
    deps: ApiDeps, call: Call, command: type[ChangeBan] | type[ChangeMute], *, restricted: bool
) -> Answer:
    body: RestrictOne = call.body
    act = await _act_on_chat(deps, call, body.reason)
    return await commit(deps, call, command(act, call.path["chat_id"], body.user_id, restricted))


async def list_chat_bans(deps: ApiDeps, call: Call) -> Answer:
    chat_id = call.path["chat_id"]
    await deps.history.ask(lambda store: store.chat(chat_id), call.deadline)
    return await bans_of(deps, call)


async def retain_from(deps: ApiDeps, call: Call) -> Answer:
    """Delete in bounded steps, as many as time allows.

    Each step is a commit and a record of its own, so that sends never wait long.
    """
    body: RetainFrom = call.body
    until = _halfway(deps, call)
    while True:
        act = await _act_on_chat(deps, call, body.reason)
        answer = await commit(deps, call, Retain(act, call.path["chat_id"], body.first_sequence))
        assert isinstance(answer.body, ChangeAnswer)
        if (
            answer.body.chat.first_sequence >= body.first_sequence
            or deps.clock.monotonic() >= until
        ):
            return answer


async def erase_user(deps: ApiDeps, call: Call) -> Answer:
    """Recorded before it begins and at each step; as many steps as time allows."""
    body: ErasePerson = call.body
    user = User(body.tenant, body.user_id)
    after = token_of(body.after)
    if after is None:
        await record(
            deps, call, "user.erase", f"{user.tenant}/{user.user_id}", body.reason, body.tenant
        )
    until = _halfway(deps, call)
    return Answer(
        await deps.eraser.erase(
            user, lambda: _act(deps, call, body.reason, body.tenant), after, until
        )
    )


async def raise_epochs(deps: ApiDeps, call: Call) -> Answer:
    """Recorded first, under the operator's name; the store records it again, with the
    server and the bases.
    """
    body: Why = call.body
    if deps.shared_log is None:
        raise InvalidMessage(
            "this server is no cluster: `holdfast restore` raises the epochs of what it restores"
        )
    await record(deps, call, "epochs.raise", "cluster", body.reason)
    return Answer(EpochsRaised(await call.done_in_time(deps.shared_log.raise_epochs(body.reason))))


async def list_halted_chats(deps: ApiDeps, call: Call) -> Answer:
    query: HaltedQuery = call.query
    return Answer(await deps.history.ask(lambda store: store.halted(query.limit), call.deadline))


async def read_audit(deps: ApiDeps, call: Call) -> Answer:
    query: AuditQuery = call.query
    after = token_of(query.after)
    return Answer(
        await deps.history.ask(lambda _chats: deps.records.audit(after, query.limit), call.deadline)
    )


async def take_backup(deps: ApiDeps, call: Call) -> Answer:
    """Recorded first, so that no copy of the data exists without a record of its
    maker."""
    body: Why = call.body
    if deps.backup is None:
        raise backups_are_those_of_postgres()
    if (step := deps.backup_step()) is not None:
        raise ServerBusy(
            f"a backup is being taken ({step.doing}); wait for it", retry_after_seconds=5.0
        )
    await record(deps, call, "backup", "state", body.reason)
    return Answer(await deps.backup())


async def get_backup_run(deps: ApiDeps, call: Call) -> Answer:
    return Answer(BackupRun(deps.backup_step()))


def key_view(key: ApiKey) -> KeyView:
    """A key without its secret."""
    return KeyView(
        key.key_id, key.kind, key.tenant, key.label, key.scopes, key.created_at, key.last_four
    )


async def list_keys(deps: ApiDeps, call: Call) -> Answer:
    return Answer(KeyList([key_view(key) for key in deps.keys.list()]))


async def issue_key(deps: ApiDeps, call: Call) -> Answer:
    """Recorded before its secret is shown, so that no unrecorded key is in use."""
    body: NewKey = call.body
    scopes = body.scopes
    if body.kind == "admin":
        scopes = sorted(ADMIN_SCOPES & call.principal.scopes) if scopes is None else scopes
        if lacking := sorted(set(scopes) - call.principal.scopes):
            raise Forbidden(
                "a key can hand out only the scopes it carries, and yours lacks"
                f" {', '.join(lacking)}: use the state directory's own (`holdfast key create` on"
                " the server's machine, without --token)",
                yours=sorted(call.principal.scopes),
            )

    async def recorded(key: ApiKey) -> None:
        details = msgspec.json.encode(
            {"kind": key.kind, "tenant": key.tenant, "scopes": key.scopes}
        ).decode()
        await record(deps, call, "key_issued", key.key_id, body.reason, details=details)

    key, secret = await deps.keys.issue(
        body.kind,
        body.label,
        timestamp(deps.clock.now()),
        tenant=body.tenant,
        scopes=scopes,
        record=recorded,
    )
    return Answer(IssuedKey(key_view(key), secret))


async def revoke_key(deps: ApiDeps, call: Call) -> Answer:
    """Recorded first; a retry after a crash in between does both again."""
    query: RevokeKey = call.query

    async def recorded(key: ApiKey) -> None:
        await record(deps, call, "key_revoked", key.key_id, query.reason)

    revoked = await deps.keys.revoke(call.path["key_id"], force=query.force, record=recorded)
    return Answer(key_view(revoked))
