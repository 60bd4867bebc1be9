"""Writes ``/docs`` and docs/reference/rest.md from the table of endpoints. (Pure.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from holdfast.api.endpoint import Endpoint
from holdfast.api.openapi import CALLERS, plain_path
from holdfast.api.responses import RETRY_AFTER_SECONDS, STATUS

STYLE = b"""\
body {
  font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
}
code { font: 14px ui-monospace, monospace; padding: .1em .3em }
code { background: #f2f2f2; border-radius: 3px }
article { border-top: 1px solid #ddd; padding: .5rem 0 }
dt { float: left; width: 10rem; color: #555 }
dd { margin-left: 11rem }
@media (prefers-color-scheme: dark) {
  body { background: #161616; color: #e6e6e6 }
  code { background: #2a2a2a }
  dt { color: #aaa }
}
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Holdfast REST</title>
<meta name="viewport" content="width=device-width">
<link rel="stylesheet" href="/docs/style.css"></head>
<body><h1>Holdfast REST</h1><p>The same as <a href="/openapi.json">OpenAPI</a>.</p>
{body}</body></html>
"""


def fields_of(shape: Any) -> str:
    """The fields of a body or query in one line: ``name``, ``limit = 50``."""
    if shape is None:
        return "–"
    if not isinstance(shape, type) or not issubclass(shape, msgspec.Struct):
        schema = msgspec.json.schema(shape)
        needed = schema.get("required", ())
        return (
            ", ".join(n if n in needed else f"{n}?" for n in schema.get("properties", ()))
            or "an object"
        )
    return (
        ", ".join(f.name if f.required else f"{f.name}?" for f in msgspec.structs.fields(shape))
        or "–"
    )


def _facts(endpoint: Endpoint) -> dict[str, str]:
    facts = {
        "Who": CALLERS[endpoint.caller] + (f" Scope: {endpoint.scope}." if endpoint.scope else "")
    }
    if endpoint.query is not None:
        facts["Query"] = fields_of(endpoint.query)
    if endpoint.body is not None:
        facts["Body"] = fields_of(endpoint.body)
    if endpoint.key != "none":
        facts["Idempotency-Key"] = "required" if endpoint.key == "required" else "optional"
    facts["Answer"] = (
        f"{endpoint.status}: {fields_of(endpoint.answer) if endpoint.answer else 'text'}"
    )
    for status, meaning in endpoint.also.items():
        facts[f"Also {status}"] = meaning
    return facts


def html_page(groups: Mapping[str, Sequence[Endpoint]]) -> bytes:
    """The page at /docs: static, without scripts."""
    parts = []
    for title, endpoints in groups.items():
        parts.append(f"<h2>{escape(title)}</h2>")
        for endpoint in endpoints:
            facts = "".join(
                f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in _facts(endpoint).items()
            )
            parts.append(
                f"<article><h3>{escape(endpoint.summary)}</h3>"
                f"<p><code>{endpoint.method} {escape(plain_path(endpoint))}</code></p>"
                f"<p>{escape(endpoint.note)}</p><dl>{facts}</dl></article>"
            )
    return _PAGE.format(body="\n".join(parts)).encode()


def markdown_page(groups: Mapping[str, Sequence[Endpoint]]) -> str:
    """docs/reference/rest.md."""
    lines = [_INTRODUCTION, "", "| status | code | Retry-After |", "|---|---|---|"]
    for code, status in STATUS.items():
        wait = RETRY_AFTER_SECONDS.get(code)
        lines.append(
            f"| {status} | {code} | {f'as the error says, else {wait} s' if wait else '–'} |"
        )
    for title, endpoints in groups.items():
        lines += ["", f"## {title}"]
        for endpoint in endpoints:
            lines += [
                "",
                f"### `{endpoint.method} {plain_path(endpoint)}`",
                "",
                f"{endpoint.summary}. {endpoint.note}",
            ]
            lines += ["", *(f"- {name}: {value}" for name, value in _facts(endpoint).items())]
    return "\n".join(line.rstrip() for line in lines) + "\n"


_INTRODUCTION = """# REST

Written from the table in `src/holdfast/api/routes.py`; a test fails when the two
differ. The machine-readable form is `/openapi.json` on a running server, and the same
page is at `/docs`.

Credentials go into `Authorization: Bearer …`, never into a URL: a user token (JWT), a
tenant API key (`hf_tenant_…`, with `X-Act-As: <user>` where a user is meant) or an
admin key (`hf_admin_…`). See [access](../guides/access.md).

Bodies are JSON of at most 64 KiB (`api.body_bytes_max`); unknown fields, wrong types,
nesting bombs and lone surrogates are refused. The head of a request has at most 32 KiB
and 100 header fields (431), its path and query 8 KiB, the path 2 KiB (414), a query 32
parameters. What is beyond a bound is not parsed, and the connection is closed after the
answer. Of a key that an object has twice, the last counts. A header that says who asks
or what is asked (Host, Authorization, X-Act-As, Idempotency-Key, Content-Type) given
twice is 400, and so is no Host. `name?` marks a field that may be left out. A request
gets its answer within 5 seconds (`api.request_seconds_max`), a backup when it is
complete.

`Idempotency-Key`: on a send it is the client_message_id and required; on other POSTs
the first answer is kept with it and given again (`Idempotency-Replayed: true`), and
nothing is done twice. The same key with another request is 409. So is a repetition
whose first answer cannot be given again: it held a secret (an API key, a webhook's),
which is not kept, and `details` has the rest of it; or the server stopped in between,
and nobody knows how far it came. Minting a token and asking about limits refuse a key:
a token is stored nowhere, and a check is no commit.

Every error, 404 and 405 included, has the same body:

```json
{"error": {"code": "NOT_A_MEMBER", "message": "…", "retryable": false,
           "outcome": "rejected", "details": {}}}
```

`outcome` comes with writes: `rejected` (nothing happened) or `unknown` (a retry with
the same key is safe). 429 has it too, in a problem document
(`application/problem+json`, RFC 9457) whose `violated-policies` are the rules that
refused, by the names that they have in `RateLimit-Policy` and `RateLimit`; see
[limits](../guides/limits.md). A chat of another tenant does not exist (404); a chat one
is not a member of is 403 NOT_A_MEMBER."""
