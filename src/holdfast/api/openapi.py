"""Builds the OpenAPI document from the table of endpoints and their types. (Pure.)"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast import __version__
from holdfast.api.endpoint import Endpoint
from holdfast.api.reply_schemas import OpenAiErrorBody
from holdfast.api.responses import STATUS
from holdfast.api.schemas import Problem, TooManyRequests
from holdfast.limits.http import PROBLEM_TYPE
from holdfast.wire.frames import ErrorBody

_REF = "#/components/schemas/{name}"
_BINDING = re.compile(r"\{(\w+)(?::path)?\}")

CALLERS = {
    "anybody": "No credential is needed.",
    "user": "A user token, or a tenant key with X-Act-As.",
    "owner": "A user token, or a tenant key, which may act for a user with X-Act-As.",
    "tenant": "A tenant API key.",
    "operator": "An admin key.",
}


def plain_path(endpoint: Endpoint) -> str:
    return _BINDING.sub(r"{\1}", endpoint.path)


def error_statuses(endpoint: Endpoint) -> list[int]:
    """The statuses of the errors this endpoint can answer with."""
    statuses = {400, 413, 500, *endpoint.errors}
    if endpoint.caller != "anybody":
        statuses |= {401, 403, 429, 503}
    if _BINDING.search(endpoint.path):
        statuses.add(404)
    if endpoint.query is not None and "after" in endpoint.query.__annotations__:
        statuses.add(404)
    if endpoint.key != "none":
        statuses.add(409)
    if endpoint.body is not None:
        statuses.add(415)
    return sorted(statuses)


def openapi_json(endpoints: Sequence[Endpoint]) -> bytes:
    """The document at /openapi.json."""
    return msgspec.json.encode(describe(endpoints))


def describe(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The whole document."""
    types = [t for e in endpoints for t in (e.body, e.query, e.answer) if t is not None] + [
        ErrorBody,
        TooManyRequests,
        Problem,
        OpenAiErrorBody,
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = {id(t): schema for t, schema in zip(types, schemas, strict=True)}
    queries = {e.query.__name__ for e in endpoints if e.query is not None}
    bodies = {e.body.__name__ for e in endpoints if e.body is not None}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, schema_of, components)
        paths.setdefault(plain_path(endpoint), {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast",
            "version": __version__,
            "description": (
                "Durable, ordered chats over REST. Live delivery is over the WebSocket at /v1/ws."
            ),
        },
        "paths": paths,
        "components": {
            "schemas": {
                name: schema for name, schema in components.items() if name not in queries - bodies
            },
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A user token (JWT) or an API key.",
                },
                "key": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "The same, where a client sends it in this header.",
                },
            },
        },
    }


def _operation(
    endpoint: Endpoint, schema_of: Mapping[int, Any], components: Mapping[str, Any]
) -> dict[str, Any]:
    who = CALLERS[endpoint.caller] + (f" Scope: {endpoint.scope}." if endpoint.scope else "")
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "description": f"{endpoint.note} {who}".strip(),
        "parameters": _parameters(endpoint, components),
        "responses": _responses(endpoint, schema_of),
    }
    if endpoint.caller != "anybody":
        operation["security"] = [{"bearer": []}, {"key": []}, *([{}] if endpoint.ticket else [])]
    if endpoint.body is not None:
        content = {"application/json": {"schema": schema_of[id(endpoint.body)]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(endpoint: Endpoint, components: Mapping[str, Any]) -> list[dict[str, Any]]:
    an_id = {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[!-~]+$"}
    number = {"type": "integer", "minimum": 1, "maximum": 2**53 - 1}
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": number if name == "sequence" else an_id,
        }
        for name in _BINDING.findall(endpoint.path)
    ]
    if endpoint.query is not None:
        shape = components[endpoint.query.__name__]
        for name, schema in shape["properties"].items():
            required = name in shape.get("required", ())
            parameters.append(
                {"name": name, "in": "query", "required": required, "schema": _not_null(schema)}
            )
    if endpoint.key != "none":
        required = endpoint.key == "required"
        parameters.append(
            {"name": "Idempotency-Key", "in": "header", "required": required, "schema": an_id}
        )
    for name in endpoint.headers:
        text = {"type": "string"}
        parameters.append({"name": name, "in": "header", "required": False, "schema": text})
    if endpoint.caller in ("user", "owner"):
        parameters.append({"name": "X-Act-As", "in": "header", "required": False, "schema": an_id})
    return parameters


def _not_null(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a parameter: left out, never null."""
    choices = [choice for choice in schema.get("anyOf", ()) if choice != {"type": "null"}]
    return choices[0] if len(choices) == 1 else schema


def _error_contents(
    endpoint: Endpoint, schema_of: Mapping[int, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The bodies of an endpoint's errors, and of 429."""
    too_many = {PROBLEM_TYPE: {"schema": schema_of[id(TooManyRequests)]}}
    match endpoint.error_shape:
        case "openai":
            openai = {"application/json": {"schema": schema_of[id(OpenAiErrorBody)]}}
            return openai, openai
        case "problem":
            return {PROBLEM_TYPE: {"schema": schema_of[id(Problem)]}}, too_many
        case "holdfast":
            return {"application/json": {"schema": schema_of[id(ErrorBody)]}}, too_many


def _responses(endpoint: Endpoint, schema_of: Mapping[int, Any]) -> dict[str, Any]:
    error, too_many = _error_contents(endpoint, schema_of)
    codes: dict[int, list[str]] = {}
    for code, status in STATUS.items():
        codes.setdefault(status, []).append(code)
    responses: dict[str, Any] = {
        str(status): {
            "description": " or ".join(codes.get(status, ["The provider's failure"])),
            "content": too_many if status == 429 else error,
        }
        for status in error_statuses(endpoint)
    }
    schema = {"type": "string"} if endpoint.answer is None else schema_of[id(endpoint.answer)]
    content: dict[str, Any] = {endpoint.media_type: {"schema": schema}}
    if endpoint.stream is not None:
        content["text/event-stream"] = {}  # a schema here cannot say what events have
    for status, meaning in {endpoint.status: endpoint.summary, **endpoint.also}.items():
        responses[str(status)] = {"description": meaning, "content": content}
    return dict(sorted(responses.items()))
