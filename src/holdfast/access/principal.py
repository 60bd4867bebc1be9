"""Who is asking. (Pure.)"""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from holdfast.errors import Forbidden
from holdfast.message import User

Kind = Literal["user", "tenant_key", "admin_key"]
Scope = Literal[
    "chats:read",  # read chats: one's own, or for an operator any chat's numbering
    "chats:write",  # change chats and send; for an operator halt and recover
    "tokens:write",  # mint user tokens of one's tenant
    "keys:write",  # list, issue and revoke API keys
    "audit:read",  # read the audit log
    "status:read",  # read status, metrics and the details of health
    "backup",  # take a backup
    "rules:read",  # read the rules of limits and their history
    "rules:write",  # change the rules of limits
    "jobs:read",  # read jobs, dead letters and blocked streams, payloads included
    "jobs:write",  # retry, release, park, bury and replay jobs
    "webhooks:write",  # add, test and remove webhook endpoints, and read their deliveries
    "limits:check",  # ask whether a subject of one's tenant may go on
]

USER_SCOPES: frozenset[Scope] = frozenset({"chats:read", "chats:write"})
TENANT_SCOPES: frozenset[Scope] = frozenset({"chats:read", "chats:write", "tokens:write", "limits:check"})
ADMIN_SCOPES: frozenset[Scope] = frozenset(get_args(Scope)) - {"tokens:write", "limits:check"}


class Principal(Struct, frozen=True):
    """A verified credential.

    ``user_id`` is the person it speaks for: a token's subject, or whom a tenant key acts for ("" if nobody).
    An admin key is no user of any tenant: its ``tenant`` is "" and its ``user_id`` names the key.
    ``expires_at`` is wall-clock seconds; None: until revoked.
    """

    tenant: str
    user_id: str
    scopes: frozenset[Scope]
    kind: Kind
    expires_at: float | None = None

    @property
    def user(self) -> User:
        return User(self.tenant, self.user_id)


def require_scope(principal: Principal, scope: Scope) -> None:
    """Forbidden unless the credential carries ``scope``; it names the command that makes a key which does."""
    if scope in principal.scopes:
        return
    if principal.kind == "user":
        raise Forbidden(f"a user token does not carry the scope {scope}", scope=scope)
    whose = "admin" if principal.kind == "admin_key" else f"tenant --tenant {principal.tenant}"
    raise Forbidden(
        f"this key lacks the scope {scope}; make one that has it: "
        f"holdfast key create {whose} --label LABEL --scope {scope}",
        scope=scope,
    )


def bearer(authorization: str | None) -> str | None:
    """The credential of an ``Authorization: Bearer …`` header, or None if there is none."""
    if authorization is None:
        return None
    scheme, _, credential = authorization.partition(" ")
    credential = credential.strip()
    return credential if scheme.lower() == "bearer" and credential else None
