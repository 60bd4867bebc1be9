"""Bodies, queries and answers of the endpoints of replies. (Pure.)

The bodies only describe: ``streaming.dialects`` reads them, field by field. What is not
named here goes to the provider as it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

_Objects = Annotated[Sequence[Mapping[str, Any]], Meta(min_length=1)]
_Tokens = Annotated[int, Meta(ge=1, le=1_000_000)]


class ChatCompletionRequest(Struct, frozen=True):
    """A chat completion, as OpenAI's API has it."""

    model: Annotated[str, Meta(min_length=1)]
    messages: _Objects
    stream: bool = False
    stream_options: Mapping[str, Any] | None = None
    max_completion_tokens: _Tokens | None = None
    max_tokens: _Tokens | None = None
    n: Literal[1] = 1
    tools: Sequence[Mapping[str, Any]] | None = None
    safety_identifier: str | None = None
    user: str | None = None


class ReplyStart(Struct, frozen=True):
    """A native reply: the fields of a chat completion, without ``stream``."""

    model: Annotated[str, Meta(min_length=1)]
    messages: _Objects
    max_completion_tokens: _Tokens | None = None
    tools: Sequence[Mapping[str, Any]] | None = None


class ResponseRequest(Struct, frozen=True):
    """A response, as OpenAI's API has it: text and function tools."""

    model: Annotated[str, Meta(min_length=1)]
    input: Annotated[str, Meta(min_length=1)] | _Objects
    instructions: str | None = None
    stream: bool = False
    store: bool = True
    background: bool = False
    max_output_tokens: _Tokens | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    metadata: Mapping[str, str] | None = None


class ChatCompletion(Struct, frozen=True):
    """The merged chunks of the provider; streamed: the chunks as events, then
    ``data: [DONE]``."""

    object: Literal["chat.completion"]
    choices: Sequence[Mapping[str, Any]]


class ResponseView(Struct, frozen=True):
    """A response; streamed: its events."""

    id: str
    object: Literal["response"]
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    output: Sequence[Mapping[str, Any]]


class DeletedResponse(Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ModelView(Struct, frozen=True):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "holdfast"


class ModelList(Struct, frozen=True):
    data: Sequence[ModelView]
    object: Literal["list"] = "list"


class NewReply(Struct, frozen=True):
    """``events_url`` has a ticket: whoever has it reads this reply for 30 minutes."""

    id: str
    events_url: str


class ResponseQuery(Struct, frozen=True):
    stream: bool = False
    starting_after: int | None = None
    """The number of the last event that the client has; with ``stream=true``."""


class EventsQuery(Struct, frozen=True):
    ticket: str | None = None
    last_event_id: str | None = None
    """As the header Last-Event-ID, which wins."""


class OpenAiError(Struct, frozen=True):
    message: str
    type: str | None
    param: str | None
    code: str | int | None


class OpenAiErrorBody(Struct, frozen=True):
    """An error as clients of OpenAI's API read it."""

    error: OpenAiError
