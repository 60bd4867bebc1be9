"""Who is asking: a verified credential and its scopes. (Pure.)"""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from holdfast.errors import Forbidden
from holdfast.message import User

PrincipalKind = Literal["user", "tenant_key", "admin_key"]
UserScope = Literal[
    "chats:read",  # read one's chats, get what is sent there, say how far one has read
    "chats:send",  # send, type, redact, mute, leave
    "chats:create",  # create chats, with anybody of the tenant
    "chats:members",  # add, remove and ban members, change roles, rename
    "replies:write",  # ask models for replies, read and cancel one's own
]
KeyScope = Literal[
    "chats:read",  # read chats: one's own, or for an operator any chat's numbering
    "chats:write",  # change chats and send; for an operator halt and recover
    "tokens:write",  # mint user tokens of one's tenant
    "keys:write",  # list, issue and revoke API keys
    "access:write",  # revoke tokens, ban, mute, disconnect; see who is cut off
    "audit:read",  # read the audit log
    "status:read",  # read status, metrics and the details of health
    "alerts:write",  # silence alerts, test their sinks
    "backup",  # take a backup
    "rules:read",  # read the rules of limits and their history
    "rules:write",  # change the rules of limits
    "jobs:read",  # read jobs, dead letters and blocked streams, payloads included
    "jobs:write",  # retry, release, park, bury and replay jobs
    "webhooks:write",  # add, test, remove webhook endpoints; read deliveries
    "limits:check",  # ask whether a subject of one's tenant may go on
    "replies:write",  # ask models for replies, read and cancel one's own; operators: cancel any
    "replies:read",  # see which replies run and wait, never their text
    "usage:read",  # read how many tokens were used
]

AnyScope = UserScope | KeyScope

USER_SCOPES: frozenset[UserScope] = frozenset(get_args(UserScope))
CHATS_WRITE: frozenset[UserScope] = frozenset({"chats:send", "chats:create", "chats:members"})
"""What ``chats:write`` of a tenant key includes."""
TENANT_SCOPES: frozenset[KeyScope] = frozenset(
    {"chats:read", "chats:write", "tokens:write", "limits:check", "replies:write"}
)
ADMIN_SCOPES: frozenset[KeyScope] = frozenset(get_args(KeyScope)) - {"tokens:write", "limits:check"}


class Principal(Struct, frozen=True):
    """A verified credential.

    ``user_id`` is a token's subject, or the user a tenant key acts for ("" if none). An
    admin key belongs to no tenant: its ``tenant`` is "" and its ``user_id`` is the
    key's id. ``expires_at`` is wall-clock seconds; None: until revoked. ``chats``
    limits it to these chats; None: all of the user's. ``issued_at`` is 0 if the token
    does not say; ``token_id`` is the id for revoking it. ``key_id`` is an API key's id,
    "" of a token.
    """

    tenant: str
    user_id: str
    scopes: frozenset[AnyScope]
    kind: PrincipalKind
    expires_at: float | None = None
    chats: frozenset[str] | None = None
    issued_at: float = 0.0
    token_id: str = ""
    key_id: str = ""

    @property
    def user(self) -> User:
        return User(self.tenant, self.user_id)

    def reads(self, chat_id: str) -> bool:
        """Whether it may read this chat, if its user is a member."""
        return "chats:read" in self.scopes and (self.chats is None or chat_id in self.chats)

    def refusal(self, scope: AnyScope, chat_id: str | None = None) -> Forbidden | None:
        """Why it may not use ``scope``, in this chat if one is named.

        None if it may.
        """
        if scope not in self.scopes:
            return _lacks(self, scope)
        if chat_id is None or self.chats is None or chat_id in self.chats:
            return None
        return Forbidden(
            f"this token is not good for the chat {chat_id}, only for those in its claim chats",
            claim="chats",
            chat_id=chat_id,
        )


def require_scope(principal: Principal, scope: AnyScope, chat_id: str | None = None) -> None:
    """Forbidden unless the credential has ``scope``, and covers the chat if one is
    named."""
    if (refusal := principal.refusal(scope, chat_id)) is not None:
        raise refusal


def _lacks(principal: Principal, scope: AnyScope) -> Forbidden:
    """The error names the scope, and how to get a credential that has it."""
    if principal.kind == "user":
        return Forbidden(
            f"this token lacks the scope {scope}: whoever makes it must grant it (`scopes` of POST"
            f" /v1/tokens, `holdfast token --scope {scope}`, or its claim)",
            scope=scope,
        )
    whose = "admin" if principal.kind == "admin_key" else f"tenant --tenant {principal.tenant}"
    needed = "chats:write" if scope in CHATS_WRITE else scope
    return Forbidden(
        f"this key lacks the scope {scope}; make one that has it: "
        f"holdfast key create {whose} --label LABEL --scope {needed}",
        scope=scope,
    )


def bearer(authorization: str | None) -> str | None:
    """The credential of an ``Authorization: Bearer …`` header, or None."""
    if authorization is None:
        return None
    scheme, _, credential = authorization.partition(" ")
    credential = credential.strip()
    return credential if scheme.lower() == "bearer" and credential else None
