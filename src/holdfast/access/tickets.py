"""Tickets: a URL that lets its bearer read one reply, and nothing else.

A browser's EventSource can send no header, so the address of a reply's events carries
the proof of who may read it. A ticket is signed with the secret of user tokens but has
an audience of its own: neither is accepted as the other. It is void as soon as the
token or the API key that asked for it is revoked, or the token's user is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast.access.keys import KeyRing
from holdfast.access.principal import Principal
from holdfast.access.tokens import Tokens
from holdfast.clock import Clock
from holdfast.errors import Unauthorized

TICKET_SECONDS = 30 * 60
_INVALID = "the ticket is not valid here: ask for the reply's events_url again"
_CLAIMS = {"reply": str, "tenant": str, "sub": str, "key": str, "jti": str, "iat": int, "exp": int}


class ReplyTicket(NamedTuple):
    """Who may read which reply."""

    reply_id: str
    principal: Principal


class ReplyTickets:
    """Mints and verifies tickets."""

    def __init__(self, tokens: Tokens, keys: KeyRing, clock: Clock) -> None:
        self._tokens = tokens
        self._keys = keys
        self._clock = clock
        self._audience = tokens.audience + "/reply"

    def mint(self, reply_id: str, principal: Principal) -> str:
        """A ticket for a reply that the principal owns."""
        now = int(self._clock.now())
        return self._tokens.sign(
            {
                "aud": self._audience,
                "reply": reply_id,
                "tenant": principal.tenant,
                "sub": principal.user_id,
                "key": principal.key_id,
                "jti": principal.token_id,
                "iat": int(principal.issued_at) or now,
                "exp": now + TICKET_SECONDS,
            }
        )

    def verify(self, ticket: str) -> ReplyTicket:
        """Unauthorized if it is forged, of another kind, expired or void."""
        claims = self._tokens.signed_claims(ticket)
        if claims.get("aud") != self._audience or not _is_whole(claims):
            raise Unauthorized(_INVALID)
        if self._clock.now() >= claims["exp"]:
            raise Unauthorized("the ticket has expired", expired=True)
        principal = Principal(
            claims["tenant"],
            claims["sub"],
            frozenset({"replies:write"}),
            "tenant_key" if claims["key"] else "user",
            float(claims["exp"]),
            issued_at=float(claims["iat"]),
            token_id=claims["jti"],
            key_id=claims["key"],
        )
        if not self.is_allowed(principal):
            raise Unauthorized("the ticket is void: its owner was revoked")
        return ReplyTicket(claims["reply"], principal)

    def is_allowed(self, principal: Principal) -> bool:
        """Whether a principal that was verified before is still not revoked."""
        if principal.key_id and not self._keys.has(principal.key_id):
            return False
        return not principal.user_id or self._tokens.is_allowed(principal)


def _is_whole(claims: dict[str, Any]) -> bool:
    return all(type(claims.get(name)) is kind for name, kind in _CLAIMS.items())
