"""A request and its response, as ASGI has them: what the endpoints need of both, and nothing on top."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from holdfast.access.door import joined_headers, repeated_header
from holdfast.access.principal import Principal
from holdfast.api.call import Endpoint
from holdfast.errors import InvalidMessage
from holdfast.limits.rules import Decision

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]


class Request:
    """One request; what becomes known of it on its way is kept here for its log line and its headers."""

    __slots__ = (
        "decisions", "endpoint", "headers", "method", "path", "path_params", "peer", "principal", "query", "receive",
        "repeated",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive) -> None:
        client = scope.get("client")
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.peer: str = client[0] if client else ""
        self.receive = receive
        self.headers, self.repeated = joined_headers(scope["headers"])
        self.path_params: Mapping[str, str] = {}
        self.endpoint: Endpoint | None = None
        self.principal: Principal | None = None
        self.decisions: Sequence[Decision] = ()

    def header(self, name: bytes) -> str | None:
        """The value of a header by its name in lower case."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def require_single_headers(self) -> None:
        """InvalidMessage if a header is repeated that may be given once."""
        if self.repeated and (name := repeated_header(self.repeated)) is not None:
            raise InvalidMessage(f"the header {name} was given more than once", field=name)


class Response(NamedTuple):
    """An answer before it is put into its envelope."""

    status: int
    body: bytes = b""
    media_type: str = "application/json"
    headers: Mapping[str, str] = {}


View = Callable[[Request], Awaitable[Response]]
