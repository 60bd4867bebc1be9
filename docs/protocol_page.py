"""docs/reference/protocol.md: frames, close codes and error codes, from their types."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast import errors
from holdfast.message import Message, Page
from holdfast.session.settings import SessionSettings
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.frames import (
    CLIENT_FRAMES,
    PROTOCOL_VERSION,
    SERVER_PAYLOADS,
    ChatHead,
    Nothing,
    ResumedChat,
)

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
    "idle_timeout": (
        "nothing from the client for 10 s after a heartbeat, and nothing more of what was"
        " sent before it is taken"
    ),
    "slow_consumer": "5 s without a new low after the warning, or 60 s in all",
    "memory_pressure": "the gateway's buffers are above their budget; the fullest go first",
    "rotation": "24 h old; or an operator closed it",
    "overloaded": "SERVER_BUSY on more than half of 30 s of requests",
    "state_diverged": "acks stay 60 s behind what was written, and a `resync` did not help",
    "upstream_failure": (
        "the user's chats could not be read at connecting; or, if set, sends have failed "
        "for the set time"
    ),
    "token_expired": (
        "expiry, unless refreshed in band; an `authenticate` frame with a token that has expired"
    ),
    "rate_limited": (
        "not read for 10 of 30 s, because it sent more than 200 frames a second; before "
        "authentication 4502"
    ),
    "duplicate_connection": (
        "a device's new socket replaces its old one; a sixth device closes the oldest"
    ),
    "protocol_error": (
        "10 invalid frames in 60 s, a frame above 64 KiB (as soon as that much of it has "
        "come), a broken WebSocket"
    ),
    "unauthorized": (
        "a bad credential, or none within 5 s; far too many frames before it; the token, "
        "or those of the user, device or tenant, were revoked, or the user banned: within"
        " a second"
    ),
}

INTRODUCTION = f"""# Protocol, version {PROTOCOL_VERSION}

Written by `docs/generate.py` from `holdfast.wire`, `holdfast.session` and
`holdfast.errors`; do not edit. This page is all that the author of a client needs of
the socket; [the conformance suite](../guides/client-conformance.md) drives a client
through it. Chats are created, listed and changed over [REST](rest.md), which also reads
what is older than a client keeps.

One WebSocket at `/v1/ws`, JSON text frames:
`{{"type": …, "request_id": …, "payload": {{…}}}}`. Ids and a `request_id` are 1 to 64
printable ASCII characters without spaces; times are RFC 3339 in UTC; a sequence is
below 2^53.

- **What a client sends** is strict: an unknown type, field or value is answered with an
  `error`, and the connection lives; ten such frames in 60 s close it. Of a key that an
  object has twice, the last counts. At most 64 KiB a frame and 16 fragments, no binary,
  no compression.
- **What the server sends** may gain types and fields: ignore what you do not know.
  Accept frames of 1 MiB: a page has 256 KiB, and a single message, escaped, may be
  larger.
- **A reply echoes the `request_id`**, so give every request one of its own; a push has
  none. Replies come in any order. Every accepted request is answered, within about 5 s,
  or the connection ends.
- Pings are answered with pongs and count as frames; of several that you send without
  reading only the last may be answered. The server sends none.
- **Fields** marked "may be left out" below are missing or `null`; all others are always
  there.
- **Many frames may come at once, and must be handled in the order in which they came.**
  In a language with promises: apply each frame, answers too, in the callback that
  received it, and settle the promise of whoever asked afterwards. Code that awaits its
  answer and then moves the cursor does so after the pushes behind that answer were
  handled, and shows them twice.

**Credential.** `Authorization: Bearer <JWT>` (this header, Host, X-Device-ID and
Sec-WebSocket-* once each, or 400); browsers offer the subprotocols
`holdfast.v1, bearer.<JWT>` and get `holdfast.v1` back; or an `authenticate` frame
first, within 5 s. Never in the URL. [What a token
holds](../guides/access.md#user-tokens). A token's scopes count for each frame:
`send_message` needs `chats:send`; `resume`, `sync_request`, `ack` and `read` need
`chats:read`, typing both; else `error` FORBIDDEN with `details.scope`. A token that is
good for some chats only is in no other: they are not pushed, and a cursor of one is
`gone`. **Device**: `X-Device-ID`, or the `authenticate` frame; make one up at the first
start and keep it, for a device's new connection replaces its old one. Without either
the connection is a device of its own. A user has at most 5 devices connected.

## What a client keeps

On disk, so that a crash loses nothing: its device id; per chat a **cursor**
`[epoch, sequence]`, up to where it has everything, with the **proof** of that cursor if
one came with it; and its unsent messages, each with its `client_message_id`.

A pushed `message` carries the `proof` of its own sequence, a page that of its
`through`. Show it with the cursor it belongs to: as a third element in `resume`,
`[epoch, sequence, proof]`, and as `proof` in `sync_request`. A cursor for which you
have none is shown without. It is needed once, when a server's store was put back to an
older state: a cursor beyond the head *with* its proof shows that messages were lost, so
the chat gets a new epoch for everybody. Without a proof the server resets your device
alone (`reset: true`, in the same epoch), for 10 requests a minute; the next gets
RATE_LIMITED.

## Connecting

1. Open the socket and wait for `connection_established`: it names the `limits` to keep
   within ([below](#limits)).
2. Send `resume` with all cursors: at most `resume_chats_per_frame` a frame, all frames
   but the last with `more: true`. The last one is answered. Leave out chats without a
   cursor; with none at all send `{{"cursors": {{}}}}`. **Without it no message is
   pushed**: every chat begins *behind*, and is *live* once a page has reached its end.
3. `resumed` names what differs, and only that. `chats`: each a page, handled as below.
   `joined`: chats you are in and sent no cursor of; one that has no page among `chats`
   is pulled with cursor `[0, 0]`, because only a page names the epoch. `gone`: you are
   not in them any more; drop the cursor. All other chats have not moved and are live.

A retryable `error` instead: send the whole resume again on the same connection, after
`retry_after_seconds`. One that is not retryable: pull each chat you know by itself, on
the same connection; pushes and heads name the others.

## Receiving

A push carries no epoch: it is of the epoch of the chat's last page. Before its first
page a chat's pushes are dropped.

| what comes | what to do |
|---|---|
| `message`, sequence = cursor + 1 | store it, move the cursor |
| `message`, sequence ≤ cursor | drop it: repeats are normal |
| `message`, sequence > cursor + 1 | do not store it; pull from the cursor. Nothing more of the \
chat is shown before that |
| a chat you do not know, in any of these | you were added to it: pull it with cursor `[0, 0]` |
| `resync` | pull each chat it names from its cursor, also if you seem to have that much: \
nothing more is pushed of it until then |
| `heartbeat` | say `heartbeat_ack`; pull each chat of `heads` whose epoch is not the cursor's \
or whose head is above it |
| a page (`sync_response`, or one of `resumed.chats`) | see below |
| `error` NOT_A_MEMBER, NOT_FOUND or FORBIDDEN to a pull | the chat is gone: drop the cursor. \
With `details.scope` or `details.claim` it is the token that does not allow it |
| `error` SLOW_CONSUMER, a push | you do not read what is sent; read faster. Messages are left \
out from now on, and `resync` names their chats |
| any other `error` to a pull | pull again after `retry_after_seconds`, or a second, also if it \
is not retryable |
| `error` NOT_A_MEMBER, NOT_FOUND or FORBIDDEN without `request_id` | a frame without an answer \
was refused, an `ack` say; pull the chat that `details.chat_id` names: only the answer to a \
pull says that it is gone |
| any other `error` without `request_id` | a frame without an answer was refused; \
`details.chat_id` may say which. After RATE_LIMITED send acks and reads again, later |

**Pulling.** `sync_request` with the cursor's epoch and sequence; one at a time per
connection, others wait at the server for 2 s at most. Pull again from `through` while
`has_more`. A chat that is live stays live: pushes go on during a pull, and reading an
old page again changes nothing. A push that arrives during a pull is judged by the
cursor like any other; one that is dropped because it is beyond cursor + 1 is in a later
page of the same pull.

**A page is authoritative.** With `reset: true` first drop your copy of the chat: its
epoch is another, so the server was restored or repaired and its numbers mean other
messages; or your cursor was beyond the head. Then store `messages`, leaving out those
at or below the cursor, and move the cursor to `[epoch, through]`, also over sequences
that are not there: they do not exist. The page that has no more makes the chat live.

**Acknowledging.** Say `ack` with the cursor when it is on disk, merged, a few times a
second at most. Never more than you have: beyond what was sent on this connection, or
resumed from, it is an error; so say none before `resumed`. Acks that stay behind what
was sent for 60 s get a `resync`, and the next time a close.

`kind: "event"` messages have a sequence like any other; their `client_message_id` is
`null`. Their `content` is JSON, and what it does not need is left out:

| `event` | fields | |
|---|---|---|
| `member_added` | `user_id`, `role`, `muted` | `sender_id` added them; `muted: true`: they \
were muted before, and still are |
| `member_removed` | `user_id`, `banned` | removed, or left if they are the sender; `banned: \
true`: removed by a ban, and cannot be added until it is lifted. If it is you, it is the chat's \
last message: drop the cursor |
| `user_banned`, `user_unbanned` | `user_id` | somebody who is not a member was banned; a ban \
was lifted (which adds nobody) |
| `member_muted`, `member_unmuted` | `user_id` | reads and cannot send: every send is answered \
FORBIDDEN with `details.muted`, which no retry changes; may send again. A mute outlives the \
membership, so it may be lifted after the member has left |
| `role_changed` | `user_id`, `role` | `owner`, `admin` or `member` |
| `chat_renamed` | `name` | |

The `sender_id` of an event that an operator caused is `an operator`, which is no user's
id (those have no spaces).

A redacted message has no content when it is read again; no frame reports a redaction.

## Sending

1. Make a `client_message_id` and store the message with it before you send it. The key
   belongs to you and the chat, permanently.
2. `message_ack` means that it is on stable storage. It is no delivery: the `message`
   itself comes to your connections as to any other, and carries the `client_message_id`
   to find it by.
3. No answer, a lost connection, or an `error` with `retryable: true`: send the same
   again under the same key, after `retry_after_seconds`; where there is none, after a
   delay as [for coming back](#leaving-and-coming-back). It is stored once, however
   often it comes, and answered with `deduplicated: true`. `retryable: false` ends it,
   whatever its code, also where the `outcome` is `unknown` (INTERNAL_ERROR: a defect,
   which a retry would meet; it may be stored).
4. To keep a chat's order through failures, have one send per chat in flight. Or
   pipeline and, after a failure, send that one and all behind it again, in order: those
   behind it were refused with it.

Keep within `rate_limit_per_second` and its burst, and all other frames within
`other_rate_limit_per_second`. Beyond that, every frame counts against
`work_rate_limit_per_second`, refused ones, pings, pongs and fragments too, and each 4
KiB of a long frame. Above it the server does not read the socket until you are within
the rate again, so your writes block; after 10 of 30 s like that it closes with 4009. A
client that heeds RATE_LIMITED never meets this.

## Staying connected

- The server says `heartbeat` every `heartbeat_interval_ms`, and wants a `heartbeat_ack`
  within 10 s of its arrival: answer from the code that reads the socket, not from
  behind an application that may be busy.
- **Slow links.** A heartbeat waits behind what was sent before it, and a page of 256
  KiB takes 100 s at 20 kbit/s. The server knows: the 10 s begin again as long as your
  machine, or the proxy before it, takes bytes; behind a proxy there is the time that
  those bytes take at 20 kbit/s, two minutes at most; and whatever you send shows that
  you are there. Only answer when asked.
- Count every deadline of your own from the last bytes that came, not from the last
  whole frame. Nothing at all for `heartbeat_interval_ms` and 15 s more, or no answer
  within 15 s while no frame is coming in: the connection is dead, drop it. A client
  that sees whole frames only gives a page two minutes, and on a slow link asks for
  small ones (`limit`).
- Before the token expires send `authenticate` with a new one of the same user;
  `authenticated` says how long that lasts. If it carries other scopes or chats than the
  one before, the connection closes with 4004 next: come back with the new token. One
  that was revoked is refused (UNAUTHORIZED, `details.revoked`), and the connection
  lives on by the one before.
- Do not stop reading: with 950 messages waiting the server warns and leaves the rest
  out, and after 5 s without progress it closes.

## Leaving and coming back

`connection_closing` is the last frame: everything before it is answered, nothing after
it is read. Wait for the close a few seconds, then close yourself. `sync_from_sequence`
is a hint; your cursors decide.

A refused handshake is an HTTP answer with the error as its body; 429 has it in a
problem document, with `RateLimit-Policy` and `RateLimit`, as [over REST](rest.md).

| how it ended | come back |
|---|---|
| close code 4500–4999, or `reconnect_allowed: false` | no; say why. Only a person, or a new \
start, tries again |
| 4008; 401 at the handshake, as for a token that expired while you were offline | with a new \
token; if that is refused too before a connection was established, stop |
| 4009 | after `reconnect_delay_ms`, and without that after 30 s; send less |
| `reconnect_delay_ms` above 0 | after exactly that time: the server spreads its clients |
| 429, 503 and any other answer with Retry-After | after a delay as below, and not before \
Retry-After |
| 400, 403, 404, 426 with our error body | no; without that body it was something between you \
and the server: as below |
| anything else: a broken connection, another code, another status, a handshake without an \
answer for 10 s | as below |

The delay is random between 0 and a bound that doubles from 1 to 16 s, without end; the
bound is 1 s again after a connection that lasted for 16 s, and the end of such a
connection with `reconnect_delay_ms` is no failure. So after a restart the first try
comes after that delay (500 clients a second, over 10 s at most), and the next, if the
server is not back yet, within 0 to 1 s. Then resume, and send again whatever got no
answer.

## Ephemeral frames

`typing`, `presence` and `receipt` are best effort, at most one per second of a kind,
chat and user, none in chats of more than 100 members, and of one user's typing five a
second in all chats together. Say `typing_start` again within 10 s while the user types.
Ask over REST who is here when you connect. A `receipt` reports to the sender of a
message how far somebody has it (`delivered`, from acks) and has read it (from `read`).
Send `read` with the highest sequence the user has seen; it has no answer, so send the
last one again after a reconnect.

**Growing replies.** In a chat with an [assistant](../guides/assistants.md) its reply
grows before it is a message. Show the text of `reply_state`, append that of each
`reply_delta`, and put the `message` whose `client_message_id` is the `reply_id` in its
place. These frames are best effort too, at most ten per second and reply; a connection
that cannot take them gets fewer and longer ones, then a `reply_state`. Rules:

- A `reply_state` replaces what you have of its reply, in any epoch that is not lower.
- A `reply_delta` is appended if its epoch is the one you have and its `from` is your
  last `to`; otherwise ignore it: a `reply_state` follows.
- `failed` removes the text: there is no message. `done` leaves it until the message.
- Frames of a reply whose message you have, or a `done` or `failed` of one that you do
  not show, are ignored: the last frame may come behind the message.
- After a lost connection drop the growing texts: those that still run come again.
- Nothing is stored, acknowledged or pulled here, and chats of more than 100 members get
  only the message. A client that ignores both types misses nothing in the end.
"""

LIMITS = {
    "max_message_size_bytes": "content of a message, in UTF-8",
    "max_frame_bytes": "a frame of yours",
    "max_queue_depth": "requests without an answer; the next gets SERVER_BUSY",
    "rate_limit_per_second": "`send_message` frames",
    "rate_limit_burst": "this many at once before that rate counts",
    "other_rate_limit_per_second": "all other frames, pings too; answers to a heartbeat are free",
    "other_rate_limit_burst": "this many at once before that rate counts",
    "work_rate_limit_per_second": "every frame, refused ones too; above it the socket is not read",
    "work_rate_limit_burst": "this many at once before that rate counts",
    "page_messages_max": "the highest `limit` of a `sync_request`; 100 if you name none",
    "resume_chats_per_frame": "cursors in one `resume` frame; 5,000 in all",
}


def page() -> str:
    lines = [INTRODUCTION, "## From the client", ""]
    for name, frame in CLIENT_FRAMES.items():
        body = next(
            field.type for field in msgspec.structs.fields(frame) if field.name == "payload"
        )
        reply = REPLIES.get(name, "none")
        lines += _frame(
            name,
            frame,
            body,
            f"Reply: {reply}, or `error`." if name in REPLIES else "An `error` if it is wrong.",
        )
    lines += ["## From the server", ""]
    for name, payload in SERVER_PAYLOADS.items():
        way = (
            "A reply." if name in ANSWERS else "A reply or a push." if name in EITHER else "A push."
        )
        lines += _frame(name, payload, payload, way)
    lines += ["### Within them", ""]
    for shape in (ResumedChat, ChatHead):
        lines += [f"`{shape.__name__}`: {_sentence(shape)}", "", *_fields(shape), ""]
    lines += [*_limits(), *_closings(), *_errors()]
    return "\n".join(lines) + "\n"


def _frame(name: str, documented: type, body: Any, way: str) -> list[str]:
    text = {
        "sync_response": f"The answer to a pull. {_sentence(Page)}",
        "message": _sentence(Message),
    }.get(name) or _sentence(documented)
    return [f"### `{name}`", "", f"{text} {way}", "", *_fields(body), ""]


def _fields(shape: Any) -> list[str]:
    if shape is Nothing:
        return ["No fields."]
    rows = ["| field | type | |", "|---|---|---|"]
    for field in msgspec.structs.fields(shape):
        optional = "" if field.required else _default(field.default)
        rows.append(f"| `{field.encode_name}` | {_type(field.type)} | {optional} |")
    return rows


def _default(value: Any) -> str:
    return f"default `{str(value).lower()}`" if isinstance(value, str | bool) else "may be left out"


def _type(kind: Any) -> str:
    schema = msgspec.json.schema(kind)
    return _schema(schema, schema.get("$defs", {}))


def _schema(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    if schema.get("$ref") == "#/$defs/CursorClaim":
        return "`[epoch, sequence]` or `[epoch, sequence, proof]`"
    if "$ref" in schema:
        return f"`{schema['$ref'].rsplit('/', 1)[-1]}`"
    if "anyOf" in schema:
        return " or ".join(
            _schema(one, defs) for one in schema["anyOf"] if one.get("type") != "null"
        )
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


def _limits() -> Iterator[str]:
    yield from (
        "## Limits",
        "",
        "`connection_established.limits`; a server may have others than these defaults.",
        "",
    )
    yield from ("| name | default | of what |", "|---|---|---|")
    announced = SessionSettings().announced()
    assert announced.keys() == LIMITS.keys()
    for name, value in announced.items():
        yield f"| `{name}` | {value:,} | {LIMITS[name]} |"
    yield ""


def _closings() -> Iterator[str]:
    yield from (
        "## Close codes",
        "",
        "The range is the rule: 4000–4499 reconnect, 4500–4999 do not. Before it closes, the server"
        " answers every accepted request and says `connection_closing`; also where what came is no"
        " WebSocket frame at all (no mask, an unknown opcode, a length in the wrong form), which is"
        " a `protocol_error` like any other.",
        "",
    )
    yield from ("| reason | code | reconnect | spread delay | when |", "|---|---|---|---|---|")
    assert {closing.reason for closing in CloseReason} == set(WHEN)
    for closing in CloseReason:
        again = "yes" if closing.reconnect_allowed else "no"
        spread = "yes" if closing.spread else "–"
        when = WHEN[closing.reason]
        yield f"| `{closing.reason}` | {closing.code} | {again} | {spread} | {when} |"
    yield ""


def _errors() -> Iterator[str]:
    yield from (
        "## Errors",
        "",
        "The same codes in `error` frames, in REST bodies and in refused handshakes.",
        "",
    )
    yield from (
        "| code | whose fault | retry | outcome of a send | meaning |",
        "|---|---|---|---|---|",
    )
    meanings = _meanings()
    for kind in _kinds(errors.HoldfastError):
        if "code" not in vars(kind) or issubclass(kind, errors.OperatorError):
            continue
        fault = "yours" if issubclass(kind, errors.Refused) else "ours"
        retry = (
            "the same key" if kind is errors.OutcomeUnknown else "later" if kind.retryable else "no"
        )
        yield f"| `{kind.code}` | {fault} | {retry} | {kind.outcome} | {meanings[kind.__name__]} |"
    yield (
        "| `SLOW_CONSUMER` | yours | – | – | a warning: the connection does not take what is sent"
        " to it; it closes after `grace_period_seconds` |"
    )


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
            found[words[0]] = (
                rest.removeprefix(code).strip() or MEANINGS.get(words[0], "")
            ).replace("``", "`")
    return {**found, **{name: text for name, text in MEANINGS.items() if not found.get(name)}}


MEANINGS = {
    "MessageTooLarge": "content or body above the limit; `details.limit` has it",
    "InvalidContentType": "not one of text/plain and text/markdown",
    "NotAMember": "you are not in this chat",
    "NotFound": "there is no such thing, or it belongs to another tenant",
    "ServerBusy": "a queue is full; nothing was tried",
}
