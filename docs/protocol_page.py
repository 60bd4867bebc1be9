"""docs/reference/protocol.md: frames, close codes and error codes, from the types that decode and encode them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast import errors
from holdfast.message import Message, Page
from holdfast.wire.closing import Closing
from holdfast.wire.frames import CLIENT_FRAMES, PROTOCOL_VERSION, SERVER_PAYLOADS, ChatHead, Nothing, ResumedChat

REPLIES = {
    "authenticate": "`connection_established` (first frame) or `authenticated` (refresh)",
    "send_message": "`message_ack`",
    "resume": "`resumed`",
    "sync_request": "`sync_response`",
}
ANSWERS = {"authenticated", "message_ack", "resumed", "sync_response"}
EITHER = {"error", "connection_established"}

WHEN = {
    "server_shutdown": "drain, at most 30 s",
    "idle_timeout": "no answer to a heartbeat for 10 s",
    "slow_consumer": "5 s without a new low after the warning, or 60 s in all",
    "memory_pressure": "the gateway's buffers are above their budget; the fullest go first",
    "rotation": "24 h old",
    "overloaded": "SERVER_BUSY on more than half of 30 s of requests",
    "state_diverged": "acks stay 60 s behind what was written, and a `resync` did not help",
    "upstream_failure": "the user's chats could not be read at connecting; or, if set, sends have failed for so long",
    "token_expired": "expiry, unless refreshed in band; an `authenticate` frame with a token that has expired",
    "duplicate_connection": "a device's new socket replaces its old one; a sixth device closes the oldest",
    "protocol_error": "10 invalid frames in 60 s, a frame above 64 KiB (as soon as so much of it has come), a broken WebSocket",
    "unauthorized": "a bad credential, or none within 5 s",
}

INTRODUCTION = f"""# Protocol, version {PROTOCOL_VERSION}

Written by `docs/generate.py` from `holdfast.wire` and `holdfast.errors`; do not edit.

One WebSocket at `/v1/ws`, JSON text frames: `{{"type": …, "request_id": …, "payload": {{…}}}}`. A reply echoes the
`request_id` (1 to 64 printable ASCII characters); a push has none. What a client sends is strict: unknown types, fields
and values are answered with an error and the connection lives; ten such frames in 60 s close it. What a server sends
may gain fields; ignore what you do not know.

**Credential.** `Authorization: Bearer <JWT>`; browsers offer the subprotocols `holdfast.v1, bearer.<JWT>` and get
`holdfast.v1` back; or an `authenticate` frame first. Never in the URL. **Device**: `X-Device-ID`, or the
`authenticate` frame; without either the connection is its own device. A refused handshake is an HTTP answer with the
error as its body: 400, 401, 403 (origin), 404, 426, 429 and 503 (both with Retry-After).

## What a client must do

1. Wait for `connection_established`, then `resume` with its cursors.
2. Store messages in order; acknowledge (`ack`) only the contiguous prefix it has stored. n ≤ cursor is a repeat: drop
   it. A gap, a `resync`, or a head in a `heartbeat` above its cursor: `sync_request` from the cursor.
3. A page is authoritative: what it does not hold up to `through` does not exist; the cursor moves to `through`.
   `reset: true`: drop the copy of the chat and start at 0.
4. Retry a send whose error is `retryable`, or that got no answer, with the same `client_message_id`; it is stored once.
   `retryable: false` ends it, also where the `outcome` is `unknown` (INTERNAL_ERROR: a defect, which a retry would meet).
5. Answer every `heartbeat`; who can see a large frame come in slowly may say `heartbeat_ack` unasked meanwhile, for the
   heartbeat waits behind it. Count deadlines from the last bytes of a frame, not from its end. Keep within `limits`; honour `reconnect_delay_ms` and `retry_after_seconds`.
6. Reconnect after close codes 4000–4499 and after every loss, waiting a random time between 0 and a bound that doubles
   from 1 to 16 s, for ever; not after 4500–4999.

[The conformance suite](../guides/client-conformance.md) drives a client through all of it.
"""


def page() -> str:
    lines = [INTRODUCTION, "## From the client", ""]
    for name, frame in CLIENT_FRAMES.items():
        body = next(field.type for field in msgspec.structs.fields(frame) if field.name == "payload")
        reply = REPLIES.get(name, "none")
        lines += _frame(
            name,
            frame,
            body,
            f"Reply: {reply}, or `error`." if name in REPLIES else "An `error` if it is wrong.",
        )
    lines += ["## From the server", ""]
    for name, payload in SERVER_PAYLOADS.items():
        way = "A reply." if name in ANSWERS else "A reply or a push." if name in EITHER else "A push."
        lines += _frame(name, payload, payload, way)
    lines += ["### Within them", ""]
    for shape in (ResumedChat, ChatHead):
        lines += [f"`{shape.__name__}`: {_sentence(shape)}", "", *_fields(shape), ""]
    lines += [*_closings(), *_errors()]
    return "\n".join(lines) + "\n"


def _frame(name: str, documented: type, body: Any, way: str) -> list[str]:
    text = {"sync_response": f"The answer to a pull. {_sentence(Page)}", "message": _sentence(Message)}.get(
        name
    ) or _sentence(documented)
    return [f"### `{name}`", "", f"{text} {way}", "", *_fields(body), ""]


def _fields(shape: Any) -> list[str]:
    if shape is Nothing:
        return ["No fields."]
    rows = ["| field | type | |", "|---|---|---|"]
    for field in msgspec.structs.fields(shape):
        optional = "" if field.required else _default(field.default)
        rows.append(f"| `{field.name}` | {_type(field.type)} | {optional} |")
    return rows


def _default(value: Any) -> str:
    return f"default `{str(value).lower()}`" if isinstance(value, str | bool) else "may be left out"


def _type(kind: Any) -> str:
    schema = msgspec.json.schema(kind)
    return _schema(schema, schema.get("$defs", {}))


def _schema(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rsplit('/', 1)[-1]}`"
    if "anyOf" in schema:
        return " or ".join(_schema(one, defs) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return "[" + ", ".join(_schema(one, defs) for one in schema["prefixItems"]) + "]"
        case "array":
            return f"list of {_schema(schema['items'], defs)}"
        case "object":
            inner = schema.get("additionalProperties")
            return f"object of {_schema(inner, defs)}" if inner else "object"
        case "string":
            return "text"
        case "boolean":
            return "true or false"
        case "integer" | "number" as kind:
            low, high = schema.get("minimum"), schema.get("maximum")
            bounds = "" if low is None else f" ≥ {low}" if high is None else f" {low} … 2^53 - 1"
            return kind + bounds
        case _:
            return "anything"


def _sentence(shape: type) -> str:
    return " ".join((inspect.getdoc(shape) or "").split()).replace("``", "`")


def _closings() -> Iterator[str]:
    yield from (
        "## Close codes",
        "",
        "The range is the rule: 4000–4499 reconnect, 4500–4999 do not. Before it closes the server answers every accepted",
        "request and says `connection_closing`; also where what came is no WebSocket frame at all (no mask, an unknown opcode,",
        "a length in the wrong form), which is a `protocol_error` like any other.",
        "",
    )
    yield from ("| reason | code | reconnect | spread delay | when |", "|---|---|---|---|---|")
    assert {closing.reason for closing in Closing} == set(WHEN)
    for closing in Closing:
        again = "yes" if closing.reconnect_allowed else "no"
        yield f"| `{closing.reason}` | {closing.code} | {again} | {'yes' if closing.spread else '–'} | {WHEN[closing.reason]} |"
    yield ""


def _errors() -> Iterator[str]:
    yield from ("## Errors", "", "The same codes in `error` frames, in REST bodies and in refused handshakes.", "")
    yield from ("| code | whose fault | retry | outcome of a send | meaning |", "|---|---|---|---|---|")
    meanings = _meanings()
    for kind in _kinds(errors.HoldfastError):
        if "code" not in vars(kind) or issubclass(kind, errors.OperatorError):
            continue
        fault = "yours" if issubclass(kind, errors.Refused) else "ours"
        retry = "the same key" if kind is errors.OutcomeUnknown else "later" if kind.retryable else "no"
        yield f"| `{kind.code}` | {fault} | {retry} | {kind.outcome} | {meanings[kind.__name__]} |"
    yield "| `SLOW_CONSUMER` | yours | – | – | a warning: the connection does not take what is sent to it; it closes after `grace_period_seconds` |"


def _kinds(root: type[errors.HoldfastError]) -> Iterator[type[errors.HoldfastError]]:
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield kind
            yield from _kinds(kind)


def _meanings() -> dict[str, str]:
    """The prose of the tree at the top of holdfast.errors, by class."""
    found = {}
    for line in (errors.__doc__ or "").splitlines():
        words = line.strip("│├└─ ").split(maxsplit=2)
        if words and words[0] in vars(errors):
            rest = " ".join(words[1:])
            code = getattr(vars(errors)[words[0]], "code", "")
            found[words[0]] = (rest.removeprefix(code).strip() or MEANINGS.get(words[0], "")).replace("``", "`")
    return {**found, **{name: text for name, text in MEANINGS.items() if not found.get(name)}}


MEANINGS = {
    "MessageTooLarge": "content or body above the limit; `details.limit` has it",
    "InvalidContentType": "not one of text/plain and text/markdown",
    "NotAMember": "you are not in this chat",
    "NotFound": "there is no such thing, or it belongs to another tenant",
    "ServerBusy": "a queue is full; nothing was tried",
}
