"""Operators' endpoints to cut users off: revocations, bans, mutes, disconnects.

Each act is recorded first. A token sent here to be revoked is never stored, only its
id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from holdfast.access.principal import Principal
from holdfast.access.revocations.contract import Revocation, RevocationKind
from holdfast.access.revocations.in_force import AHEAD_SECONDS_MAX
from holdfast.access.tokens import TOKEN_BYTES_MAX
from holdfast.api.admin import record
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call
from holdfast.api.schemas import Id, RequestBody, Why, _After, _Reason
from holdfast.clock import timestamp
from holdfast.errors import InvalidMessage, Unauthorized
from holdfast.message import User
from holdfast.telemetry import log

_FIELDS: Mapping[RevocationKind, tuple[frozenset[str], frozenset[str]]] = {
    "token": (frozenset(), frozenset({"token", "jti", "tenant"})),
    "user": (frozenset({"user_id"}), frozenset({"tenant", "issued_before"})),
    "device": (frozenset({"user_id", "device_id"}), frozenset({"tenant", "issued_before"})),
    "ban": (frozenset({"user_id"}), frozenset({"tenant"})),
    "mute": (frozenset({"user_id"}), frozenset({"tenant"})),
    "tenant": (frozenset({"tenant"}), frozenset({"issued_before"})),
}
"""The required and the optional fields of each kind."""


class NewRevocation(RequestBody, frozen=True):
    """token: ``token``, or its ``jti``. user: tokens issued before ``issued_before``
    (left out: all up to now). device: such tokens, shown by ``device_id``. ban: every
    token. mute: every send, and what else puts something before others. tenant: such
    tokens of every user of ``tenant``, which must be named; elsewhere ``tenant`` left
    out is ``default``.
    """

    kind: RevocationKind
    reason: _Reason
    tenant: Id | None = None
    user_id: Id | None = None
    device_id: Id | None = None
    token: Annotated[str, Meta(min_length=1, max_length=TOKEN_BYTES_MAX)] | None = None
    jti: Id | None = None
    issued_before: (
        Annotated[str, Meta(max_length=40, description="RFC 3339, with its time zone.")] | None
    ) = None


class RevocationsQuery(RequestBody, frozen=True):
    """``after`` is the ``next`` of the page before; the others leave out what is of
    another kind, tenant or user.
    """

    after: _After = 0
    limit: Annotated[int, Meta(ge=1, le=500)] = 100
    kind: RevocationKind | None = None
    tenant: Id | None = None
    user_id: Id | None = None


class Disconnect(RequestBody, frozen=True):
    """``device_id`` left out: every device of the user."""

    user_id: Id
    reason: _Reason
    tenant: Id = "default"
    device_id: Id | None = None


class RevocationView(Struct, frozen=True):
    """``token_id``: a token's jti, or its digest. ``ends_at`` null: until lifted."""

    number: int
    kind: RevocationKind
    tenant: str
    user_id: str | None
    device_id: str | None
    token_id: str | None
    issued_before: str | None
    made_at: str
    ends_at: str | None


class RevocationPage(Struct, frozen=True):
    """``next`` is null on the last page."""

    revocations: Sequence[RevocationView]
    next: int | None


class Disconnected(Struct, frozen=True):
    """How many connections were closed; 0: nobody matched."""

    closed: int


async def list_revocations(deps: ApiDeps, call: Call) -> Answer:
    query: RevocationsQuery = call.query
    kind, tenant, user_id = query.kind, query.tenant, query.user_id

    def fits(entry: Revocation) -> bool:
        """Called for up to 100,000 entries in one turn of the loop."""
        return (
            (user_id is None or entry.user_id == user_id)
            and (kind is None or entry.kind == kind)
            and (tenant is None or entry.tenant == tenant)
        )

    found = deps.revocations.page(query.after, query.limit + 1, fits)
    shown = found[: query.limit]
    return Answer(
        RevocationPage(
            [_view(e) for e in shown], shown[-1].number if len(found) > query.limit else None
        )
    )


async def add_revocation(deps: ApiDeps, call: Call) -> Answer:
    body: NewRevocation = call.body
    entry = _entry(deps, body)
    deps.revocations.require_room(entry)
    act = f"{'user' if entry.kind in ('ban', 'mute') else entry.kind}.{_verb(entry.kind)}"
    await record(deps, call, act, _target(entry), body.reason, details=_details(entry))
    stored = await call.done_in_time(deps.revocations.add(entry))
    log.info("access.revocation_added", kind=stored.kind, number=stored.number)
    return Answer(_view(stored))


async def lift_revocation(deps: ApiDeps, call: Call) -> Answer:
    query: Why = call.query
    entry = deps.revocations.find(call.path["number"])
    await record(
        deps, call, "revocation.lift", _target(entry), query.reason, details=_details(entry)
    )
    lifted = await call.done_in_time(deps.revocations.remove(entry.number))
    log.info("access.revocation_lifted", kind=lifted.kind, number=lifted.number)
    return Answer(_view(lifted))


async def disconnect_user(deps: ApiDeps, call: Call) -> Answer:
    body: Disconnect = call.body
    target = f"{body.tenant}/{body.user_id}" + (f"/{body.device_id}" if body.device_id else "")
    await record(deps, call, "user.disconnect", target, body.reason)
    closed = deps.disconnect(User(body.tenant, body.user_id), body.device_id)
    log.info("access.user_disconnected", connections=closed)
    return Answer(Disconnected(closed))


def _entry(deps: ApiDeps, body: NewRevocation) -> Revocation:
    """The entry that a request asks for; InvalidMessage names a wrong field."""
    needed, taken = _FIELDS[body.kind]
    given = {
        name
        for name in ("tenant", "user_id", "device_id", "token", "jti", "issued_before")
        if getattr(body, name)
    }
    if missing := sorted(needed - given):
        raise InvalidMessage(f"{body.kind} needs {missing[0]}", field=missing[0])
    if unfit := sorted(given - needed - taken):
        raise InvalidMessage(f"{body.kind} takes no {unfit[0]}", field=unfit[0])
    now = deps.clock.now()
    tenant, made_at, longest = body.tenant or "default", timestamp(now), deps.tokens.longest_seconds
    user_id = body.user_id or ""
    match body.kind:
        case "token":
            if (body.token is None) is (body.jti is None):
                raise InvalidMessage("give the token, or its jti", field="token")
            if body.jti is not None:
                return Revocation("token", tenant, "", body.jti, 0, made_at, now + longest)
            shown = _shown(deps, body)
            ends_at = max(now, shown.issued_at) + longest
            return Revocation(
                "token", shown.tenant, shown.user_id, shown.token_id, 0, made_at, ends_at
            )
        case "user" | "device" | "tenant":
            before = _moment(body.issued_before, now)
            ends_at = max(before, now) + longest
            return Revocation(
                body.kind, tenant, user_id, body.device_id or "", before, made_at, ends_at
            )
        case "ban" | "mute":
            return Revocation(body.kind, tenant, user_id, "", 0, made_at, None)


def _shown(deps: ApiDeps, body: NewRevocation) -> Principal:
    """The principal of the token. An invalid token needs no revocation, and is most
    likely the wrong one."""
    try:
        shown = deps.tokens.read(body.token or "", early=True)
    except Unauthorized as error:
        raise InvalidMessage(
            f"this token is refused already ({error.message}); nothing was changed", field="token"
        ) from None
    if body.tenant not in (None, shown.tenant):
        raise InvalidMessage(f"the token is of the tenant {shown.tenant}", field="tenant")
    return shown


def _moment(text: str | None, now: float) -> float:
    """The time before which tokens are refused.

    ``iat`` is in whole seconds, so tokens of the current second count as before now.
    """
    if text is None:
        return math.floor(now) + 1.0
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise InvalidMessage(
            "issued_before is a moment such as 2026-01-31T12:00:00Z", field="issued_before"
        )
    if at.timestamp() > now + AHEAD_SECONDS_MAX:
        raise InvalidMessage(
            f"issued_before is more than {AHEAD_SECONDS_MAX:.0f} s ahead; to keep a user out, ban"
            " them",
            field="issued_before",
        )
    return at.timestamp()


def _verb(kind: RevocationKind) -> str:
    return kind if kind in ("ban", "mute") else "revoke"


def _target(entry: Revocation) -> str:
    return "/".join(part for part in (entry.tenant, entry.user_id, entry.item) if part)


def _details(entry: Revocation) -> str:
    return msgspec.json.encode(
        {"kind": entry.kind, "issued_before": _time(entry.issued_before)}
    ).decode()


def _view(entry: Revocation) -> RevocationView:
    return RevocationView(
        number=entry.number,
        kind=entry.kind,
        tenant=entry.tenant,
        user_id=entry.user_id or None,
        device_id=entry.item if entry.kind == "device" else None,
        token_id=entry.item if entry.kind == "token" else None,
        issued_before=_time(entry.issued_before),
        made_at=entry.made_at,
        ends_at=_time(entry.ends_at),
    )


def _time(moment: float | None) -> str | None:
    return timestamp(moment) if moment else None
