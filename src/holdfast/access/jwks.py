"""Reads a set of public keys as an issuer publishes it (JWKS, RFC 7517). (Pure.)

Each key gets the one algorithm that its type allows: RS256 for RSA, ES256 for P-256,
EdDSA for Ed25519. The key's own fields (``alg``, ``use``, ``key_ops``) may narrow that,
never widen it. An unusable key is left out; a set without a usable key is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jwt

from holdfast.access.tokens import TokenKey
from holdfast.bounds import KIB
from holdfast.errors import BadSetting

JWKS_BYTES_MAX = 256 * KIB
JWKS_KEYS_MAX = 100
KID_CHARACTERS_MAX = 256
RSA_BITS_MAX = 8192
"""The cost of checking a signature grows with it. PyJWT sets the minimum, 2048."""
_EXPONENT_CHARACTERS_MAX = 6
"""A 32-bit exponent in base64url; 65537 is usual, and a long one slows every check."""
_ALGORITHMS = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
_SECRET_PARTS = {"d", "p", "q", "dp", "dq", "qi", "oth", "k"}
_PROBLEMS_SHOWN = 3

KeySet = Mapping[str | None, TokenKey]
"""Keys by ``kid``; under None the only key of a set, if it has no ``kid``."""


class BadJwks(Exception):
    """No usable keys; ``reason`` is one word for metrics, the text is for operators."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def read_jwks(data: bytes) -> KeySet:
    """The usable keys of a set; BadJwks if there are none."""
    if len(data) > JWKS_BYTES_MAX:
        raise BadJwks("too_large", f"it has more than {JWKS_BYTES_MAX // KIB} KiB")
    try:
        document = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise BadJwks("invalid", "it is not JSON") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise BadJwks("invalid", "it is not an object with an array `keys`")
    if len(entries) > JWKS_KEYS_MAX:
        raise BadJwks("invalid", f"it has more than {JWKS_KEYS_MAX} keys")
    keys, problems = _usable_keys(entries)
    if not keys:
        shown = "; ".join(problems[:_PROBLEMS_SHOWN]) or "it is empty"
        raise BadJwks("no_usable_key", f"no key of it can be used: {shown}")
    return keys


def _usable_keys(entries: list[Any]) -> tuple[dict[str | None, TokenKey], list[str]]:
    """The usable keys with a unique ``kid``, and what is wrong with the others."""
    found: dict[str | None, list[TokenKey]] = {}
    problems = []
    for number, entry in enumerate(entries, 1):
        try:
            kid, key = _usable(entry)
        except ValueError as problem:
            problems.append(f"key {number}: {problem}")
        else:
            found.setdefault(kid, []).append(key)
    for kid, keys in list(found.items()):
        if len(keys) > 1 or (kid is None and len(found) > 1):
            del found[kid]
            problems.append(
                "a key without kid beside others"
                if kid is None
                else f"the kid {kid!r} is there twice"
            )
    return {kid: keys[0] for kid, keys in found.items()}, problems


def _usable(entry: Any) -> tuple[str | None, TokenKey]:
    """A key and its ``kid``; ValueError says why it cannot be used."""
    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    kid = entry.get("kid")
    if kid is not None and (not isinstance(kid, str) or not 1 <= len(kid) <= KID_CHARACTERS_MAX):
        raise ValueError(f"its kid must be a text of 1 to {KID_CHARACTERS_MAX} characters")
    if _SECRET_PARTS & entry.keys():
        raise ValueError("it is a private or shared key, which nobody may publish: replace it")
    if entry.get("use", "sig") != "sig":
        raise ValueError("its use is not sig")
    operations = entry.get("key_ops", ["verify"])
    if not isinstance(operations, list) or "verify" not in operations:
        raise ValueError("its key_ops do not include verify")
    return kid, _token_key(entry)


def _token_key(entry: dict[str, Any]) -> TokenKey:
    kind, curve = entry.get("kty"), entry.get("crv")
    algorithm = (
        _ALGORITHMS.get((kind, curve))
        if isinstance(kind, str) and isinstance(curve, str | None)
        else None
    )
    if algorithm is None:
        raise ValueError("its kty and crv are none of RSA, EC P-256 and OKP Ed25519")
    if entry.get("alg", algorithm) != algorithm:
        raise ValueError(f"its alg is not {algorithm}")
    if algorithm == "RS256" and (
        len(str(entry.get("n"))) > RSA_BITS_MAX // 6 + 2
        or len(str(entry.get("e"))) > _EXPONENT_CHARACTERS_MAX
    ):
        raise ValueError(
            f"its modulus has more than {RSA_BITS_MAX} bits, or its exponent more than 32"
        )
    try:
        key = jwt.PyJWS().get_algorithm_by_name(algorithm).from_jwk(entry)
        return TokenKey(algorithm, key)
    except (jwt.PyJWTError, TypeError, KeyError, ValueError, BadSetting) as error:
        raise ValueError(f"it is no {algorithm} key ({error})") from None
