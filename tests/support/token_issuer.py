"""A token issuer for tests: keys of every kind, the set it publishes, signed tokens."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

ISSUER = "https://sign-in.example"
KINDS = ("RS256", "ES256", "EdDSA")


@cache
def private_key(kind: str, name: str = "a") -> PrivateKeyTypes:
    """One of its own for each name."""
    match kind:
        case "RS256":
            return rsa.generate_private_key(public_exponent=65537, key_size=2048)
        case "ES256":
            return ec.generate_private_key(ec.SECP256R1())
        case "EdDSA":
            return ed25519.Ed25519PrivateKey.generate()
    raise AssertionError(kind)


def jwk(kind: str, name: str = "a", **changes: Any) -> dict[str, Any]:
    """The public key as published under its name; a change to None omits the field."""
    public: Any = private_key(kind, name).public_key()  # type: ignore[union-attr]
    made = jwt.PyJWS().get_algorithm_by_name(kind).to_jwk(public, as_dict=True)
    made.pop("key_ops", None)
    given = {**made, "kid": name, "use": "sig", "alg": kind, **changes}
    return {field: value for field, value in given.items() if value is not None}


def jwks(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def signed(
    kind: str, name: str | None = "a", key: str = "", now: float = 1_700_000_000, **claims: Any
) -> str:
    """A token of the key ``key`` (by default the one that ``name``, its kid, says); a
    claim of None is left out.
    """
    given = {
        "iss": ISSUER,
        "aud": "holdfast",
        "sub": "alice",
        "iat": int(now),
        "exp": int(now) + 600,
        **claims,
    }
    payload = {claim: value for claim, value in given.items() if value is not None}
    headers = {} if name is None else {"kid": name}
    signer: Any = private_key(kind, key or name or "a")
    return jwt.encode(payload, signer, kind, headers)
