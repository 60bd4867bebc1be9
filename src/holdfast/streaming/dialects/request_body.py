"""Reads a request body: split by field, decoded only where it is read. (Pure.)

Decoding 4 MiB of JSON takes up to 897 ms (small numbers), splitting it at most 20. What
no dialect reads goes on to the provider as the bytes that came.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import Raw

from holdfast.errors import InvalidMessage, MessageTooLarge
from holdfast.message import check_id
from holdfast.wire.codec import LONE_SURROGATE, has_lone_surrogate

STRUCTURE_MAX = 100_000
"""Of ``{``, ``[`` and ``,`` in a body: what makes JSON slow to decode. More: 413."""
FIELDS_MAX = 200
"""At the top of a body; chat completions have about 40."""
OUTPUT_TOKENS_MAX = 1_000_000
_PIECE_BYTES = 256 * 1024
_fields = msgspec.json.Decoder(dict[str, Raw])


def split(body: bytes) -> dict[str, Raw]:
    """The fields of a JSON object, not decoded.

    InvalidMessage if it is not one in valid UTF-8, without lone surrogates and without
    deep nesting; MessageTooLarge if it has too much structure.
    """
    if len(body) - len(body.translate(None, b"{[,")) > STRUCTURE_MAX:
        raise MessageTooLarge(
            f"the body has more than {STRUCTURE_MAX} objects, arrays and commas",
            limit=STRUCTURE_MAX,
        )
    try:
        _check_utf8(body)
        fields = _fields.decode(body)
    except RecursionError:
        raise InvalidMessage("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidMessage("the body is not valid UTF-8") from None
    except msgspec.ValidationError:
        raise InvalidMessage("the body must be a JSON object") from None
    except msgspec.DecodeError as error:
        if has_lone_surrogate(error, body):
            raise InvalidMessage(f"the body {LONE_SURROGATE}") from None
        why = str(error).removeprefix("JSON is malformed: ")
        raise InvalidMessage(f"the body is not valid JSON: {why}") from None
    if len(fields) > FIELDS_MAX:
        raise InvalidMessage(f"the body has more than {FIELDS_MAX} fields")
    return fields


def _check_utf8(body: bytes) -> None:
    """In pieces: one emoji makes a str of 4 bytes for each character."""
    if len(body) <= _PIECE_BYTES:
        body.decode()
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(body), _PIECE_BYTES):
        decoder.decode(body[at : at + _PIECE_BYTES])
    decoder.decode(b"", final=True)


def read(fields: Mapping[str, Raw], name: str, shape: Any, what: str) -> Any:
    """A field as ``shape``; None if it is missing or null."""
    raw = fields.get(name)
    return None if raw is None else decode(bytes(raw), name, shape | None, what)


@cache
def _decoder(shape: Any) -> msgspec.json.Decoder[Any]:
    """Cached: to make one takes longer than to decode a field. Shapes are few."""
    return msgspec.json.Decoder(shape)


def decode(raw: bytes, name: str, shape: Any, what: str) -> Any:
    """JSON as ``shape``; InvalidMessage says that ``name`` must be ``what``."""
    try:
        return _decoder(shape).decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise invalid(name, f"must be {what}") from None


def read_model(fields: Mapping[str, Raw]) -> str:
    """The model's name."""
    model: str | None = read(fields, "model", str, "the name of a model")
    if not model:
        raise invalid("model", "is missing: name a model (GET /v1/models)")
    return model


def read_output_tokens(fields: Mapping[str, Raw], *names: str) -> int | None:
    """The first of these fields that is given: the most tokens of the answer."""
    given: int | None = None
    for name in names:
        number: int | None = read(fields, name, int, "a whole number")
        if number is not None and not 1 <= number <= OUTPUT_TOKENS_MAX:
            raise invalid(name, f"must be between 1 and {OUTPUT_TOKENS_MAX}")
        given = given or number
    return given


def read_user(fields: Mapping[str, Raw]) -> str:
    """Whom the request is for: ``safety_identifier``, else ``user``, else "".

    What is no id of ours (an address, a text of any length) counts by its hash.
    """
    for name in ("safety_identifier", "user"):
        user: str | None = read(fields, name, str, "text")
        if user:
            if check_id(user, name) is None:
                return user
            return "h_" + hashlib.blake2b(user.encode(), digest_size=16).hexdigest()
    return ""


def invalid(name: str, why: str) -> InvalidMessage:
    return InvalidMessage(f"{name} {why}", field=name)
