"""User tokens: JWTs, minted and verified.

A token is trusted only if its key is trusted, its algorithm is the one pinned to that
key (the header does not decide), and ``exp``, ``iat``, ``aud``, ``iss`` and ``sub`` are
present and right. A refusal says what to do, never why the signature failed.

This server signs with its own secret (HS256). Other issuers sign with keys that they
publish (RS256, ES256, EdDSA; ``holdfast.access.issuers``). The algorithm first decides
between the two, so that a public key is never used as a secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import jwt

from holdfast.access.jws import CompactJws, json_object, read
from holdfast.access.principal import USER_SCOPES, Principal, UserScope
from holdfast.clock import Clock, Ids
from holdfast.errors import BadSetting, InvalidMessage, Unauthorized
from holdfast.message import User, check_id, check_tenant

TOKEN_BYTES_MAX = 6144
"""Enough for ``CHATS_MAX`` ids of ours; below a proxy's usual 8 KiB for a header."""
CHATS_MAX = 100
"""The most chats that a token can be limited to."""
SECRET_BYTES_MIN = 32

_SCOPES_ARE = f"the scopes of a token are {', '.join(sorted(USER_SCOPES))}"
_INVALID = "the token is not valid here: get a new one"
_CLAIMS = ("exp", "iat", "aud", "iss", "sub")
TAKEN_CLAIMS = frozenset({*_CLAIMS, "nbf", "jti", "tenant", "chats"})


@dataclass(frozen=True, slots=True)
class TokenKey:
    """A key with its one algorithm; BadSetting if they do not fit.

    It is prepared once: PyJWT would check with every token whether the secret is a
    public key by mistake.
    """

    algorithm: str
    key: Any
    """The key as PyJWT wants it: bytes for HS256, otherwise a public key."""
    _verify: Callable[[bytes, bytes], bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            algorithm = jwt.PyJWS().get_algorithm_by_name(self.algorithm)
            key = algorithm.prepare_key(self.key)
            problem = algorithm.check_key_length(key)
        except (jwt.PyJWTError, NotImplementedError, TypeError, ValueError) as error:
            raise BadSetting(
                f"the token key cannot be used with {self.algorithm}: {error}"
            ) from None
        if self.algorithm == "none" or problem:
            raise BadSetting(
                f"the token key cannot be used with {self.algorithm}:"
                f" {problem or 'it signs nothing'}"
            )
        object.__setattr__(
            self, "_verify", lambda data, signature: algorithm.verify(data, key, signature)
        )

    def signed(self, token: CompactJws) -> bool:
        """Whether this key, with its algorithm, signed the token."""
        return token.header.get("alg") == self.algorithm and self._verify(
            token.signed, token.signature
        )


ASYMMETRIC = frozenset({"RS256", "ES256", "EdDSA"})
"""Algorithms of other issuers. HS256 is this server's own: see the module."""


class IssuerTerms(NamedTuple):
    """What an issuer's tokens must contain. ``tenants`` None: any tenant."""

    issuer: str
    audience: str
    scope_claim: str
    tenants: tuple[str, ...] | None = None


class TrustedIssuer(Protocol):
    """Another issuer whose tokens are accepted."""

    @property
    def terms(self) -> IssuerTerms: ...

    def key(self, kid: str | None) -> TokenKey:
        """The key that a token names; Unauthorized if there is none, Unavailable until
        that is known."""
        ...


KeySource = Callable[[str | None], Sequence[TokenKey]]
"""Finds the keys for a token's ``kid`` (None: the token has none), all of one
algorithm: the first signs, any may have signed. Empty: there is none."""


def shared_secret(*secrets: bytes) -> KeySource:
    """Secrets for all tokens, HS256 only: the first signs, all verify."""
    for secret in secrets:
        if len(secret) < SECRET_BYTES_MIN:
            raise BadSetting(
                f"the token secret has {len(secret)} bytes; at least {SECRET_BYTES_MIN} are needed"
            )
    keys = tuple(TokenKey("HS256", secret) for secret in secrets)
    return lambda kid: keys if kid is None else ()


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Whose tokens we take."""

    issuer: str = "holdfast"
    """A token of another ``iss`` is refused (401)."""
    audience: str = "holdfast"
    """A token of another ``aud`` is refused (401)."""
    leeway_seconds: float = 5
    """How far clocks may differ when ``exp``, ``nbf`` and ``iat`` are judged."""
    default_tenant: str | None = "default"
    """The tenant of a token that names none; ``null`` (in YAML) refuses such tokens."""
    ttl_seconds_max: float = 30 * 86400
    """The longest lifetime of a token. Asking for a longer one is refused (400); so is
    one that somebody else signed for longer (401). A revocation of tokens ends after
    that time. So if you raise it, tokens that were too long before, and whose
    revocation has ended, are good again: revoke them once more.
    """
    scope_claim: str = "holdfast_scopes"
    """The claim that says what a token may do: an array of ``chats:read``,
    ``chats:send``, ``chats:create``, ``chats:members`` and ``replies:write``. Anything
    else in it: 401.
    """
    default_scopes: tuple[UserScope, ...] = ("chats:read", "chats:send")
    """What a token without that claim may do."""
    secret_file: str = ""
    """A file with the keys of tokens, the same on every node: one on each line, of 32
    bytes or more; the first signs, all verify. Others must not be able to read it. A
    change takes effect after a restart. Left empty: the secret in ``secrets.json``.
    """

    def __post_init__(self) -> None:
        if not self.issuer or not self.audience:
            raise BadSetting("token issuer and audience must not be empty")
        if not 0 <= self.leeway_seconds <= 60:
            raise BadSetting("token leeway_seconds must be between 0 and 60")
        if self.ttl_seconds_max <= 0:
            raise BadSetting("token ttl_seconds_max must be greater than 0")
        if not self.scope_claim or self.scope_claim in TAKEN_CLAIMS:
            raise BadSetting(
                f"token scope_claim must be a claim of its own, not {self.scope_claim!r}"
            )
        if unknown := sorted(set(self.default_scopes) - USER_SCOPES):
            raise BadSetting(f"token default_scopes: there is no scope {unknown[0]}; {_SCOPES_ARE}")


class Tokens:
    """Mints and verifies user tokens."""

    def __init__(
        self,
        settings: TokenSettings,
        keys: KeySource,
        clock: Clock,
        check: Callable[[Principal], None] = lambda principal: None,
        ids: Ids | None = None,
        issuers: Mapping[str, TrustedIssuer] | None = None,
    ) -> None:
        """``check`` raises Unauthorized for a revoked principal; ``issuers`` are the
        other accepted issuers by ``iss``."""
        self._settings = settings
        self._terms = IssuerTerms(settings.issuer, settings.audience, settings.scope_claim)
        self._issuers = issuers or {}
        self._keys = keys
        self._clock = clock
        self._default_scopes = frozenset(settings.default_scopes)
        self._check_revoked = check
        self._ids = ids or Ids(clock)

    @property
    def longest_seconds(self) -> float:
        """The time after which every token issued until now is invalid on any clock.

        A valid token was issued at most the leeway after now, expires at most the
        lifetime and the leeway later, and stays valid for the leeway after that.
        """
        return self._settings.ttl_seconds_max + 3 * self._settings.leeway_seconds

    def mint(
        self,
        user: User,
        ttl_seconds: float,
        scopes: Collection[str] | None = None,
        chats: Collection[str] | None = None,
    ) -> str:
        """A token for ``user`` with these scopes (None: default) and chats (None: all).

        BadSetting if the keys cannot sign, as public keys cannot.
        """
        if not 0 < ttl_seconds <= self._settings.ttl_seconds_max:
            bound = self._settings.ttl_seconds_max
            raise InvalidMessage(
                f"ttl_seconds must be more than 0 and at most {bound:.0f}", field="ttl_seconds"
            )
        now = int(self._clock.now())
        claims: dict[str, Any] = {
            "iss": self._settings.issuer,
            "aud": self._settings.audience,
            "sub": user.user_id,
            "tenant": user.tenant,
            "iat": now,
            "exp": now + int(ttl_seconds),
            "jti": self._ids.new("tok_"),
        }
        if scopes is not None:
            claims[self._settings.scope_claim] = _known_scopes(scopes)
        if chats is not None:
            claims["chats"] = _usable_chats(chats)
        token = self.sign(claims)
        if len(token) > TOKEN_BYTES_MAX:
            raise InvalidMessage(
                f"a token has at most {TOKEN_BYTES_MAX} bytes; name fewer chats", field="chats"
            )
        return token

    @property
    def audience(self) -> str:
        return self._settings.audience

    def sign(self, claims: Mapping[str, Any]) -> str:
        """Claims signed by this server; BadSetting if its keys cannot sign."""
        keys = self._keys(None)
        if not keys or not keys[0].algorithm.startswith("HS"):
            raise BadSetting("tokens are minted elsewhere: this server holds only public keys")
        return jwt.encode(dict(claims), keys[0].key, keys[0].algorithm)

    def signed_claims(self, token: str) -> dict[str, Any]:
        """What this server itself signed; nothing of it is checked but the signature.

        Unauthorized if it did not.
        """
        if len(token) > TOKEN_BYTES_MAX:
            raise Unauthorized(f"it is longer than {TOKEN_BYTES_MAX} bytes")
        try:
            found = read(token)
            if not _is_signed(found, self._keys(found.header.get("kid"))):
                raise Unauthorized(_INVALID)
            return json_object(found.payload)
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise Unauthorized(_INVALID) from None

    def is_allowed(self, principal: Principal) -> bool:
        """Whether a principal that was verified before is not revoked since."""
        try:
            self._check_revoked(principal)
        except Unauthorized:
            return False
        return True

    def verify(self, token: str) -> Principal:
        """The principal of a token; Unauthorized with a reason the caller can act on.

        ``expired`` in its details: the token was valid once, so a new one may be too.
        """
        principal = self.read(token)
        self._check_revoked(principal)
        return principal

    def read(self, token: str, *, early: bool = False) -> Principal:
        """``verify`` without revocations, for an operator who revokes the token.

        ``early`` also accepts a token that is not valid yet.
        """
        found, claims, terms = self._claims(token)
        expires_at, issued_at = self._lifetime(claims, early=early)
        tenant = self._tenant(claims, terms)
        for claim, value, check in (
            ("sub", claims["sub"], check_id),
            ("tenant", tenant, check_tenant),
        ):
            problem = check(value, claim) if isinstance(value, str) else f"{claim} must be a string"
            if problem:
                raise Unauthorized(f"the token's claim is not usable: {problem}", claim=claim)
        scopes, chats = self._grants(claims, terms.scope_claim)
        token_id = _token_id(claims.get("jti"), found)
        return Principal(
            tenant, claims["sub"], scopes, "user", expires_at, chats, issued_at, token_id
        )

    def _tenant(self, claims: Mapping[str, Any], terms: IssuerTerms) -> Any:
        """The tenant a token names, or its issuer's.

        Other issuers have only their own.
        """
        own = terms.tenants
        default = (
            self._settings.default_tenant if own is None else own[0] if len(own) == 1 else None
        )
        tenant = claims.get("tenant", default)
        if tenant is None:
            raise Unauthorized("the token lacks the claim tenant", claim="tenant")
        if own is not None and tenant not in own:
            raise Unauthorized(
                "the token's issuer does not speak for the tenant it names", claim="tenant"
            )
        return tenant

    def _grants(
        self, claims: Mapping[str, Any], claim: str
    ) -> tuple[frozenset[UserScope], frozenset[str] | None]:
        """A token's scopes, and the chats it is limited to.

        Unauthorized names a bad claim.
        """
        scopes, chats = self._default_scopes, None
        if claim in claims:
            named = _texts(claims, claim)
            if unknown := [name for name in named if name not in USER_SCOPES]:
                raise Unauthorized(
                    f"the token's claim {claim} names no scope of this server: {unknown[0][:64]!r};"
                    f" {_SCOPES_ARE}",
                    claim=claim,
                    scope=unknown[0][:64],
                )
            scopes = _shared(frozenset(named))
        if "chats" in claims:
            chats = frozenset(_texts(claims, "chats"))
            if len(chats) > CHATS_MAX:
                raise Unauthorized(
                    f"the token's claim chats names more than {CHATS_MAX} chats", claim="chats"
                )
        return scopes, chats

    def _claims(self, token: str) -> tuple[CompactJws, Mapping[str, Any], IssuerTerms]:
        """The claims, after checking signature, issuer and audience, but not the
        times."""
        if len(token) > TOKEN_BYTES_MAX:
            raise Unauthorized(f"the token is longer than {TOKEN_BYTES_MAX} bytes")
        try:
            found = read(token)
            keys, terms = self._keys(found.header.get("kid")), self._terms
            if not keys or keys[0].algorithm != found.header.get("alg"):
                keys, terms = self._foreign(found)
            if not _is_signed(found, keys):
                raise Unauthorized(_INVALID)
            claims = json_object(found.payload)
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            # The errors of the parsers and the library for a malformed token.
            raise Unauthorized(_INVALID) from None
        self._check(claims, terms)
        return found, claims, terms

    def _foreign(self, found: CompactJws) -> tuple[Sequence[TokenKey], IssuerTerms]:
        """The key and terms of another issuer's token.

        The unverified ``iss`` only chooses the key; the signature then proves it.
        """
        issuer = None
        if self._issuers and found.header.get("alg") in ASYMMETRIC:
            named = json_object(found.payload).get("iss")
            issuer = self._issuers.get(named) if isinstance(named, str) else None
        if issuer is None:
            raise Unauthorized(_INVALID)
        return (issuer.key(found.header.get("kid")),), issuer.terms

    def _check(self, claims: Mapping[str, Any], terms: IssuerTerms) -> None:
        """Unauthorized unless all claims are there, with the right issuer and
        audience."""
        for claim in _CLAIMS:
            if claims.get(claim) is None:
                raise Unauthorized(f"the token lacks the claim {claim}", claim=claim)
        if claims["iss"] != terms.issuer:
            raise Unauthorized("the token comes from another issuer", claim="iss")
        if not _is_meant_for(terms.audience, claims["aud"]):
            raise Unauthorized("the token is meant for another audience", claim="aud")
        if not isinstance(claims.get("jti", ""), str):
            raise Unauthorized("the token's claim jti must be a string", claim="jti")

    def _lifetime(self, claims: Mapping[str, Any], *, early: bool) -> tuple[float, float]:
        """When the token expires, and when it was issued.

        Unauthorized if it has expired, is not valid yet, or lives longer than a token
        may: such a token could outlive its revocation.
        """
        now, leeway = self._clock.now(), self._settings.leeway_seconds
        expires_at, issued_at = _moment(claims, "exp"), _moment(claims, "iat")
        if now >= expires_at + leeway:
            raise Unauthorized("the token has expired: get a new one", claim="exp", expired=True)
        for claim in ("nbf", "iat"):
            if claim in claims and _moment(claims, claim) > now + leeway and not early:
                raise Unauthorized("the token is not valid yet: check the clocks", claim=claim)
        if (
            expires_at
            > (issued_at if early else min(issued_at, now))
            + self._settings.ttl_seconds_max
            + leeway
        ):
            bound = self._settings.ttl_seconds_max
            raise Unauthorized(
                f"the token lives longer than {bound:.0f} s, the most here"
                " (access.tokens.ttl_seconds_max): get a shorter one",
                claim="exp",
            )
        return expires_at, issued_at


def _is_signed(token: CompactJws, keys: Sequence[TokenKey]) -> bool:
    """Whether one of these keys signed the token."""
    return any(key.signed(token) for key in keys)


@lru_cache(64)
def _shared(scopes: frozenset[UserScope]) -> frozenset[UserScope]:
    """One set for all tokens with these scopes: connections keep it."""
    return frozenset(scope for scope in USER_SCOPES if scope in scopes)


def _token_id(jti: object, token: CompactJws) -> str:
    """The id for revoking a token: its ``jti`` if valid, else a digest of what was
    signed.

    A digest is longer than an id may be, so no ``jti`` can equal one.
    """
    if isinstance(jti, str) and not check_id(jti, "jti"):
        return jti
    return "sha256:" + hashlib.sha256(token.signed).hexdigest()


def _known_scopes(scopes: Collection[str]) -> list[str]:
    if unknown := sorted(set(scopes) - USER_SCOPES):
        raise InvalidMessage(
            f"there is no scope {unknown[0][:64]!r}; {_SCOPES_ARE}", field="scopes"
        )
    return sorted(set(scopes))


def _usable_chats(chats: Collection[str]) -> list[str]:
    if problem := next((bad for chat_id in chats if (bad := check_id(chat_id, "chats"))), None):
        raise InvalidMessage(problem, field="chats")
    if len(chats) > CHATS_MAX:
        raise InvalidMessage(
            f"a token is limited to at most {CHATS_MAX} chats", field="chats", limit=CHATS_MAX
        )
    return sorted(set(chats))


def _texts(claims: Mapping[str, Any], claim: str) -> list[Any]:
    """A claim as an array of strings; Unauthorized if it is anything else."""
    value = claims[claim]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Unauthorized(f"the token's claim {claim} must be an array of texts", claim=claim)
    return value


def _moment(claims: Mapping[str, Any], claim: str) -> float:
    """A claim as a time (seconds since the epoch).

    Unauthorized if it is anything else.
    """
    value = claims[claim]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise Unauthorized(f"the token's claim {claim} must be a number of seconds", claim=claim)
    return float(value)


def _is_meant_for(audience: str, claim: object) -> bool:
    """Whether ``aud`` is, or contains, this audience."""
    if isinstance(claim, list):
        return audience in claim and all(isinstance(name, str) for name in claim)
    return claim == audience
