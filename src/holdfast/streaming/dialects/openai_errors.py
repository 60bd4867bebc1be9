"""Errors in the shape that clients of OpenAI's API read. (Pure.)"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.streaming.reply import ReplyError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_object(
    status: int, message: str, code: str | None, param: str | None = None
) -> dict[str, Any]:
    """The object under ``error``."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"message": message, "type": kind, "param": param, "code": code}


def reply_error(error: ReplyError) -> dict[str, Any]:
    """The object of a reply that failed: the provider's own if it refused."""
    if error.body and (own := _own_object(error.body)):
        return own
    return error_object(error.status, error.message, error.code)


def error_body(error: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"error": error})


def _own_object(body: bytes) -> dict[str, Any] | None:
    """A provider's error object, with or without ``error`` around it.

    None unless it has a message: clients show that.
    """
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        found = found["error"]
    if not isinstance(found, dict) or not isinstance(found.get("message"), str):
        return None
    return {"type": None, "param": None, "code": None, **found}
