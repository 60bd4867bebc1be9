"""User tokens: JWTs, minted and verified.

A token is trusted only if its key is ours, its algorithm is the one pinned to that key (the header's word
counts for nothing), and ``exp``, ``aud``, ``iss`` and ``sub`` are present and right. What a caller learns from
a refusal is what to do about it, never why the signature failed.

Keys come from a function of the token's ``kid``, so that a set of public keys (JWKS) takes the place of the
shared secret without a change here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from holdfast.access.principal import USER_SCOPES, Principal
from holdfast.clock import Clock
from holdfast.errors import BadSetting, InvalidMessage, Unauthorized
from holdfast.message import User, check_id, check_tenant

TOKEN_BYTES_MAX = 4096
SECRET_BYTES_MIN = 32

_INVALID = "the token is not valid here: get a new one"
_CLAIMS = ("exp", "aud", "iss", "sub")


@dataclass(frozen=True, slots=True)
class TokenKey:
    """A key with the one algorithm it may be used with."""

    algorithm: str
    key: Any
    """What PyJWT takes for the algorithm: bytes for HS256, a public key otherwise."""


KeySource = Callable[[str | None], TokenKey | None]
"""The key for a token's ``kid`` (None: it has none), or None if there is no such key."""


def shared_secret(secret: bytes) -> KeySource:
    """One secret for all tokens, HS256 and nothing else."""
    if len(secret) < SECRET_BYTES_MIN:
        raise BadSetting(f"the token secret has {len(secret)} bytes; at least {SECRET_BYTES_MIN} are needed")
    key = TokenKey("HS256", secret)
    return lambda kid: key if kid is None else None


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Whose tokens we take. ``default_tenant``: where a token names none; None refuses such a token."""

    issuer: str = "holdfast"
    audience: str = "holdfast"
    leeway_seconds: float = 5
    default_tenant: str | None = "default"
    ttl_seconds_max: float = 30 * 86400

    def __post_init__(self) -> None:
        if not self.issuer or not self.audience:
            raise BadSetting("token issuer and audience must not be empty")
        if not 0 <= self.leeway_seconds <= 60:
            raise BadSetting("token leeway_seconds must be between 0 and 60")
        if self.ttl_seconds_max <= 0:
            raise BadSetting("token ttl_seconds_max must be greater than 0")


class Tokens:
    """Mints and verifies user tokens."""

    def __init__(self, settings: TokenSettings, keys: KeySource, clock: Clock) -> None:
        self._settings = settings
        self._keys = keys
        self._clock = clock

    def mint(self, user: User, ttl_seconds: float) -> str:
        """A token that speaks for ``user``. BadSetting if the keys cannot sign (a set of public keys)."""
        signing = self._keys(None)
        if signing is None or not signing.algorithm.startswith("HS"):
            raise BadSetting("tokens are minted elsewhere: this server holds only public keys")
        if not 0 < ttl_seconds <= self._settings.ttl_seconds_max:
            bound = self._settings.ttl_seconds_max
            raise InvalidMessage(f"ttl_seconds must be more than 0 and at most {bound:g}", field="ttl_seconds")
        now = int(self._clock.now())
        claims = {
            "iss": self._settings.issuer,
            "aud": self._settings.audience,
            "sub": user.user_id,
            "tenant": user.tenant,
            "iat": now,
            "exp": now + int(ttl_seconds),
        }
        return jwt.encode(claims, signing.key, signing.algorithm)

    def verify(self, token: str) -> Principal:
        """The principal a token speaks for; Unauthorized with a reason the caller can act on.

        ``expired`` in its details: the token was good in its time, and a new one may be, too.
        """
        claims = self._claims(token)
        expires_at = self._lifetime(claims)
        tenant = claims.get("tenant", self._settings.default_tenant)
        if tenant is None:
            raise Unauthorized("the token lacks the claim tenant", claim="tenant")
        for claim, value, check in (("sub", claims["sub"], check_id), ("tenant", tenant, check_tenant)):
            problem = check(value, claim) if isinstance(value, str) else f"{claim} must be a string"
            if problem:
                raise Unauthorized(f"the token's claim is not usable: {problem}", claim=claim)
        return Principal(tenant, claims["sub"], USER_SCOPES, "user", expires_at)

    def _claims(self, token: str) -> Mapping[str, Any]:
        """The claims of a token whose signature, issuer and audience are right; times are not checked yet."""
        if len(token) > TOKEN_BYTES_MAX:
            raise Unauthorized(f"the token is longer than {TOKEN_BYTES_MAX} bytes")
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            key = self._keys(kid)
            if key is None:
                raise Unauthorized(_INVALID)
            return jwt.decode(
                token,
                key.key,
                algorithms=[key.algorithm],
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                options={
                    "require": list(_CLAIMS),
                    # Times are judged by the injected clock, in ``_lifetime``.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.MissingRequiredClaimError as error:
            raise Unauthorized(f"the token lacks the claim {error.claim}", claim=error.claim) from None
        except jwt.InvalidAudienceError:
            raise Unauthorized("the token is meant for another audience", claim="aud") from None
        except jwt.InvalidIssuerError:
            raise Unauthorized("the token comes from another issuer", claim="iss") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            # PyJWT lets some errors of the JSON and base64 parsers through; all mean the same here.
            raise Unauthorized(_INVALID) from None

    def _lifetime(self, claims: Mapping[str, Any]) -> float:
        """When the token expires; Unauthorized if that is past or its time has not come."""
        now, leeway = self._clock.now(), self._settings.leeway_seconds
        expires_at = _moment(claims, "exp")
        if now >= expires_at + leeway:
            raise Unauthorized("the token has expired: get a new one", claim="exp", expired=True)
        for claim in ("nbf", "iat"):
            if claim in claims and _moment(claims, claim) > now + leeway:
                raise Unauthorized("the token is not valid yet: check the clocks", claim=claim)
        return expires_at


def _moment(claims: Mapping[str, Any], claim: str) -> float:
    """A claim that is a moment (seconds since the epoch); Unauthorized if it is anything else."""
    value = claims[claim]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise Unauthorized(f"the token's claim {claim} must be a number of seconds", claim=claim)
    return float(value)
