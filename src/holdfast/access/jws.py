"""Parses a token: three parts in base64url (JWS compact serialization). (Pure.)

Nothing in a parsed token is trusted before PyJWT has checked the signature. Parsing is
done here because PyJWT parses a token twice, character by character: most of the cost
when all clients reconnect at once.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, NamedTuple


class CompactJws(NamedTuple):
    """The parts of a token, not yet trusted. ``payload`` is the raw bytes, unparsed."""

    header: dict[str, Any]
    payload: bytes
    signature: bytes
    signed: bytes
    """The signed bytes: header and payload as they arrived."""


def read(token: str) -> CompactJws:
    """The parts of a token; ValueError, TypeError or RecursionError if it is malformed.

    A header with ``crit`` is refused, because no extension is supported; so is an
    unencoded payload (``b64``).
    """
    signed, _, signature = token.encode("ascii").rpartition(b".")
    head, _, payload = signed.partition(b".")
    header = json_object(_decode(head))
    if (
        "crit" in header
        or header.get("b64", True) is not True
        or not isinstance(header.get("kid", ""), str)
    ):
        raise ValueError("a header that is not understood")
    return CompactJws(header, _decode(payload), _decode(signature), signed)


def json_object(data: bytes) -> dict[str, Any]:
    """Decode a JSON object; ValueError or RecursionError if ``data`` is not one."""
    value = json.loads(data.decode())
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _decode(part: bytes) -> bytes:
    """Decode base64url; ValueError unless ``part`` is the canonical encoding, unpadded.

    The decoder ignores foreign characters, surplus bits and more; encoding its result
    again and comparing reveals all of that at once.
    """
    data = urlsafe_b64decode(part + b"==")
    written = urlsafe_b64encode(data)
    if part != written.rstrip(b"=") and part != written:
        raise ValueError("not base64url")
    return data
