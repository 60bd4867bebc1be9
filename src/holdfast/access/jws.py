"""A token as it is written: three parts in base64url (JWS compact serialization), read once. (Pure.)

Reading says nothing about who wrote it: nothing in it counts before the signature is checked, which is PyJWT's part.
The reading is not, because it reads a token twice, character by character: most of what a returning crowd costs.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, NamedTuple


class CompactJws(NamedTuple):
    """The parts of a token, not yet trusted. ``payload`` is what its signer wrote: bytes, not yet parsed."""

    header: dict[str, Any]
    payload: bytes
    signature: bytes
    signed: bytes
    """What the signature is over: header and payload as they were written."""


def read(token: str) -> CompactJws:
    """The parts of a token; ValueError, TypeError or RecursionError if it is none.

    A header that must be understood (``crit``) is refused, for none is understood here; so is a payload that claims
    not to be encoded (``b64``).
    """
    signed, _, signature = token.encode("ascii").rpartition(b".")
    head, _, payload = signed.partition(b".")
    header = json_object(_decode(head))
    if "crit" in header or header.get("b64", True) is not True or not isinstance(header.get("kid", ""), str):
        raise ValueError("a header that is not understood")
    return CompactJws(header, _decode(payload), _decode(signature), signed)


def json_object(data: bytes) -> dict[str, Any]:
    """The object that ``data`` is; ValueError or RecursionError if it is none."""
    value = json.loads(data.decode())
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _decode(part: bytes) -> bytes:
    """The bytes that ``part`` stands for; ValueError unless it is the only way to write them, padding apart.

    The decoder passes over what is not of its alphabet, bits that are too many, and more; writing what it found once
    more shows all of that at once.
    """
    data = urlsafe_b64decode(part + b"==")
    written = urlsafe_b64encode(data)
    if part != written.rstrip(b"=") and part != written:
        raise ValueError("not base64url")
    return data
