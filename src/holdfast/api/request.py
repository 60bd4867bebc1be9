"""From an ASGI request to a checked call: who asks, may they, and what they want.

``receive`` checks everything before an endpoint runs. It refuses in this order:
repeated headers, credential, rate, kind of caller, scope, path, query, Idempotency-Key,
room for the body, body. ``Request`` is the little of ASGI that this needs.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote_plus

import msgspec
from msgspec import Struct, inspect

from holdfast import telemetry
from holdfast.access.keys import is_api_key
from holdfast.access.network import client_ip, joined_headers, repeated_header
from holdfast.access.principal import Principal, bearer, require_scope
from holdfast.api.address_limits import AddressLimits
from holdfast.api.deps import ApiDeps, ApiSettings
from holdfast.api.endpoint import Call, Endpoint
from holdfast.api.problems import invalid_body, invalid_query
from holdfast.errors import (
    Forbidden,
    InvalidContentType,
    InvalidMessage,
    MessageTooLarge,
    NotFound,
    RateLimited,
    Refused,
    Unauthorized,
    Unavailable,
)
from holdfast.limits.entry_points import EntryPoint, checks_of
from holdfast.limits.http import refusal, refusing
from holdfast.limits.rules import Decision
from holdfast.message import SEQUENCE_MAX, check_id
from holdfast.streaming.body_bytes import ReservedBytes

AsgiScope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]


class PieceWriter(Protocol):
    """Our server's way to write a streamed answer without a coroutine for a piece."""

    def write_head(self, start: AsgiMessage, piece: bytes) -> bool:
        """Write status, headers and the first piece, which may be empty; False: only
        ``send`` can."""
        ...

    def can_write(self) -> bool:
        """Whether a piece can be written; if not, ``send`` waits for the client."""
        ...

    def write_piece(self, piece: bytes) -> None: ...

    @property
    def written_at(self) -> float:
        """When the last piece was written, in the loop's time."""
        ...


class Request:
    """One request, and what is learned about it on the way.

    The access log and the response headers read ``endpoint``, ``principal`` and
    ``decisions`` from here.
    """

    __slots__ = (
        "decisions", "endpoint", "headers", "method", "on_disconnect", "path", "path_params",
        "peer", "piece_writer", "principal", "query", "raw_headers", "receive", "repeated",
        "take_body",
    )  # fmt: skip

    def __init__(self, scope: AsgiScope, receive: AsgiReceive) -> None:
        client = scope.get("client")
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.peer: str = client[0] if client else ""
        self.receive = receive
        self.on_disconnect: Callable[[Callable[[bool], None]], None] | None = scope.get(
            "holdfast.on_disconnect"
        )
        """Our server's way to say that the client left (True) or has ended its side
        (False), without a waiting task."""
        self.piece_writer: PieceWriter | None = scope.get("holdfast.piece_writer")
        self.take_body: Callable[[], bytes | None] = scope.get("holdfast.take_body", _no_body)
        """Our server's way to give a body that has come whole, without a coroutine and
        a timer; None: ``receive`` it."""
        self.raw_headers: RawHeaders = scope["headers"]
        self.headers, self.repeated = joined_headers(self.raw_headers)
        self.path_params: Mapping[str, str] = {}
        self.endpoint: Endpoint | None = None
        self.principal: Principal | None = None
        self.decisions: Sequence[Decision] = ()

    def header(self, name: bytes) -> str | None:
        """The value of the header with this name, given in lower case."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def forget_headers(self) -> None:
        """Keep only what the access log needs: thousands of answers may wait."""
        self.raw_headers.clear()
        self.decisions = ()
        self.headers = {
            name: value for name, value in self.headers.items() if name == b"x-forwarded-for"
        }

    def require_single_headers(self) -> None:
        """InvalidMessage if a header appears twice that may appear once."""
        if self.repeated and (name := repeated_header(self.repeated)) is not None:
            raise InvalidMessage(f"the header {name} was given more than once", field=name)


def _no_body() -> None:
    return None


PARAMETERS_MAX = 32
"""In a query; more than any endpoint takes. A longer query is refused unparsed."""
NOBODY = Principal("", "", frozenset(), "user")
_INTEGER_DIGITS_MAX = len(str(SEQUENCE_MAX))
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})


async def receive(
    deps: ApiDeps,
    address_limits: AddressLimits,
    draining: asyncio.Event,
    endpoint: Endpoint,
    request: Request,
) -> Call:
    """Check a request and return its call; raise the first reason to refuse it."""
    try:
        request.require_single_headers()
    except InvalidMessage:
        address_limits.count_request(address_of(request, deps), request.path)
        raise
    principal = request.principal = _identified(deps, address_limits, endpoint, request)
    if endpoint.caller != "anybody":
        await _ask_limits(deps, endpoint, request, principal)
        require_caller(principal, endpoint)
    path = _path(request.path_params)
    if endpoint.scope is not None:
        require_scope(principal, endpoint.scope, path.get("chat_id"))
    query = _fitting(endpoint, _query, endpoint.query, request.query)
    key = _key(endpoint, request)
    body, reservation = await _body_within_bounds(deps, endpoint, request, principal)
    fingerprint = _fingerprint(endpoint, path, body) if key and not endpoint.raw else ""
    deadline = deps.clock.monotonic() + (
        endpoint.deadline_seconds or deps.settings.request_seconds_max
    )
    return Call(
        principal, path, query, body, key, fingerprint, deps.clock, deadline, draining,
        _headers(endpoint, request), reservation,
    )  # fmt: skip


def address_of(request: Request, deps: ApiDeps) -> str:
    """The client's address, as far as declared proxies vouch for it."""
    if not deps.proxies:
        return request.peer
    return client_ip(request.peer, request.header(b"x-forwarded-for") or "", deps.proxies)


def identify(deps: ApiDeps, request: Request) -> Principal:
    """The principal of the request's credential; Unauthorized or Forbidden."""
    credential = bearer(request.header(b"authorization"))
    if (other := request.header(b"x-api-key")) is not None:
        if b"authorization" in request.headers:
            raise InvalidMessage("two credentials were sent: send one", field="x-api-key")
        credential = other.strip()
    if not credential:
        raise Unauthorized("a credential is needed: Authorization: Bearer <token or API key>")
    act_as = request.header(b"x-act-as")
    if not is_api_key(credential):
        if act_as is not None:
            raise Forbidden("only a tenant API key can act for a user")
        return deps.tokens.verify(credential)
    key = deps.keys.find(credential)
    if act_as is not None:
        if key.kind != "tenant":
            raise Forbidden("only a tenant API key can act for a user")
        if problem := check_id(act_as, "X-Act-As"):
            raise InvalidMessage(problem, field="X-Act-As")
    return key.principal(act_as)


def require_caller(principal: Principal, endpoint: Endpoint) -> None:
    """Forbidden unless this kind of caller may use the endpoint."""
    match endpoint.caller:
        case "user" | "owner" if principal.kind == "admin_key":
            raise Forbidden("an admin key is no user; use a user token or a tenant key")
        case "user" if not principal.user_id:
            raise Forbidden("say for which user this tenant key acts: X-Act-As: <user>")
        case "tenant" if principal.kind != "tenant_key":
            raise Forbidden("this needs a tenant API key: holdfast key create tenant --label LABEL")
        case "operator" if principal.kind != "admin_key":
            raise Forbidden("this needs an admin key: holdfast key create admin --label LABEL")
        case _:
            pass
    if endpoint.scope is not None:
        require_scope(principal, endpoint.scope)


def _identified(
    deps: ApiDeps, address_limits: AddressLimits, endpoint: Endpoint, request: Request
) -> Principal:
    """The principal, with failures counted by address.

    An endpoint open to anybody ignores a bad credential.
    """
    ticket = _ticket(request) if endpoint.ticket else None
    try:
        principal = identify(deps, request) if ticket is None else _reader(deps, request, ticket)
    except (Refused, Unavailable) as refusal:
        address, open_to_anybody = address_of(request, deps), endpoint.caller == "anybody"
        sent = _CREDENTIALS & request.headers.keys() or ticket is not None
        if isinstance(refusal, Unauthorized) and sent and not open_to_anybody:
            address_limits.count_failed_login(address)
        else:
            address_limits.count_request(address, request.path)
        if open_to_anybody:
            return NOBODY
        raise
    return principal


def _ticket(request: Request) -> str | None:
    return dict(_parameters(request.query)).get("ticket")


def _reader(deps: ApiDeps, request: Request, ticket: str) -> Principal:
    """The principal that a ticket lets read this reply."""
    if _CREDENTIALS & request.headers.keys():
        raise InvalidMessage("two credentials were sent: send one", field="ticket")
    found = deps.tickets.verify(ticket)
    if found.reply_id != request.path_params["reply_id"]:
        raise NotFound("there is no such reply")
    return found.principal


async def _ask_limits(
    deps: ApiDeps, endpoint: Endpoint, request: Request, principal: Principal
) -> None:
    """RateLimited by the caller's rules, before it is known whether they may call this.

    A refusal costs work too, so it counts. An allowed check of another service's
    subject gets no RateLimit headers about the caller: its answer is about the subject.
    """
    if endpoint.scope == "limits:check" and principal.kind == "tenant_key":
        decisions = [
            await deps.limits.limiter.check(*check) for check in checks_of("check", principal.user)
        ]
    else:
        entry_point: EntryPoint = "admin" if principal.kind == "admin_key" else endpoint.entry_point
        decisions = await deps.limits.entry_points.decide(
            entry_point, principal.user, address_of(request, deps)
        )
        request.decisions = decisions
    if refused := refusal(decisions):
        request.decisions = decisions
        if endpoint.entry_point == "reply":
            telemetry.reply_refused("rate")
        raise refused


def violated(request: Request, error: RateLimited) -> list[str]:
    """The rules that refused a request.

    A rule asked further in (ingest asks for a send) is added to the headers too.
    """
    decisions: list[Decision] = [*request.decisions]
    known = {decision.rule for decision in decisions}
    decisions += [decision for decision in refusing(error) if decision.rule not in known]
    request.decisions = decisions
    return [decision.rule for decision in decisions if decision.exceeded and not decision.allowed]


def _path(params: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in params.items():
        if check_id(value, name):
            raise NotFound(f"there is no such {name.removesuffix('_id')}")
    return params


def _key(endpoint: Endpoint, request: Request) -> str | None:
    key = request.header(b"idempotency-key")
    if key is None:
        if endpoint.key == "required":
            raise InvalidMessage(
                "the header Idempotency-Key is missing: a new one for each message, the same one"
                " for a retry",
                field="Idempotency-Key",
            )
        return None
    if endpoint.key == "none":
        text = (
            "this request takes no Idempotency-Key: it does what it does each time, or keeps"
            " nothing at all"
        )
        raise InvalidMessage(text, field="Idempotency-Key")
    if problem := check_id(key, "Idempotency-Key"):
        raise InvalidMessage(problem, field="Idempotency-Key")
    return key


def _fingerprint(endpoint: Endpoint, path: Mapping[str, str], body: object) -> str:
    request = msgspec.json.encode([endpoint.name, sorted(path.items()), body])
    return hashlib.blake2b(request, digest_size=16).hexdigest()


@cache
def _integers(shape: type[Struct]) -> frozenset[str]:
    """The fields of a query that hold a number or nothing."""
    description = inspect.type_info(shape)
    assert isinstance(description, inspect.StructType)
    choices = {f.name: getattr(f.type, "types", (f.type,)) for f in description.fields}
    return frozenset(
        name
        for name, types in choices.items()
        if any(isinstance(t, inspect.IntType) for t in types)
    )


def _fitting(
    endpoint: Endpoint, read: Callable[[Any, Any], Any], shape: type | None, given: bytes
) -> Any:
    try:
        return read(shape, given)
    except InvalidMessage as wrong:
        raise endpoint.on_invalid_input(wrong) from None


def _query(shape: type[Struct] | None, written: bytes) -> Any:
    """Decode a query as ``shape``: each parameter once, numbers in plain digits.

    The cost is linear in the query's length.
    """
    if shape is None:
        if written:
            first = unquote_plus(
                written.partition(b"&")[0].partition(b"=")[0][:64].decode("latin-1")
            )
            raise InvalidMessage("this request takes no query parameters", field=first)
        return None
    given: dict[str, str] = {}
    for name, value in _parameters(written):
        if name in given:
            raise InvalidMessage(f"{name[:64]} was given twice; give it once", field=name[:64])
        plain = value.isascii() and value.isdigit() and len(value) <= _INTEGER_DIGITS_MAX
        if name in _integers(shape) and not plain:
            raise InvalidMessage(
                f"{name} must be a whole number from 0 to {SEQUENCE_MAX}, in digits", field=name
            )
        given[name] = value
    try:
        return msgspec.convert(given, shape, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_query(error, shape) from None


def _parameters(written: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            written.decode("latin-1"), keep_blank_values=True, max_num_fields=PARAMETERS_MAX
        )
    except ValueError:
        raise InvalidMessage(f"a query may have at most {PARAMETERS_MAX} parameters") from None


def _headers(endpoint: Endpoint, request: Request) -> Mapping[str, str]:
    """The headers that this endpoint reads, under the names it has for them."""
    sent = {name: request.header(name.lower().encode()) for name in endpoint.headers}
    return {name: value for name, value in sent.items() if value is not None}


async def _body_within_bounds(
    deps: ApiDeps, endpoint: Endpoint, request: Request, principal: Principal
) -> tuple[Any, ReservedBytes | None]:
    """The body, and the bytes that it holds if the endpoint reserves them."""
    bytes_max = endpoint.body_bytes_max or deps.settings.body_bytes_max
    announced = _announced_bytes(request, bytes_max)
    reservation = endpoint.reserve and endpoint.reserve(deps, principal, announced)
    try:
        data = await _read(endpoint, request, deps.settings, reservation)
        if endpoint.raw:
            return data, reservation
        return _fitting(endpoint, _body, endpoint.body, data), reservation
    except BaseException:
        if reservation is not None:
            reservation.free()
        raise


def _announced_bytes(request: Request, bytes_max: int) -> int:
    """The size of the body that is to come, the bound if nobody says it.

    MessageTooLarge before anything of it is read.
    """
    length = request.headers.get(b"content-length", b"")
    if not length.isdigit():
        return bytes_max
    if int(length[:20]) > bytes_max:
        raise MessageTooLarge(f"the body is larger than {bytes_max} bytes", limit=bytes_max)
    return int(length)


async def _read(
    endpoint: Endpoint,
    request: Request,
    settings: ApiSettings,
    reservation: ReservedBytes | None,
) -> bytes:
    """Read the body within its bounds of size and time.

    A body that the endpoint does not take is refused, not ignored.
    """
    headers = request.headers
    if (
        endpoint.body is None
        and headers.get(b"content-length", b"0") == b"0"
        and b"transfer-encoding" not in headers
    ):
        return b""
    data = await _whole_body(
        request,
        endpoint.body_bytes_max or settings.body_bytes_max,
        endpoint.body_seconds_max or settings.body_seconds_max,
        reservation,
    )
    if endpoint.body is None and data:
        raise InvalidMessage("this request takes no body")
    if endpoint.body is not None:
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type != b"application/json":
            raise InvalidContentType("the body must be JSON: send Content-Type: application/json")
    return data


async def _whole_body(
    request: Request, bytes_max: int, seconds_max: float, reservation: ReservedBytes | None
) -> bytes:
    if (whole := request.take_body()) is not None and len(whole) <= bytes_max:
        if reservation is not None:
            reservation.grow(len(whole))
        return whole
    too_large = f"the body is larger than {bytes_max} bytes"
    if whole is not None:
        raise MessageTooLarge(too_large, limit=bytes_max)
    body = bytearray()  # a list of tiny pieces would take many times their bytes
    try:
        async with asyncio.timeout(seconds_max):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise InvalidMessage("the client disconnected before its request was complete")
                piece: bytes = message.get("body", b"")
                if len(body) + len(piece) > bytes_max:
                    raise MessageTooLarge(too_large, limit=bytes_max)
                if reservation is not None:
                    reservation.grow(len(piece))
                more = message.get("more_body")
                if not more and not body:
                    return piece
                body += piece
                if not more:
                    return bytes(body)
    except TimeoutError:
        raise InvalidMessage(f"the body did not arrive within {seconds_max:g} seconds") from None


def _body(shape: type | None, data: bytes) -> Any:
    if shape is None:
        return None
    try:
        return msgspec.json.decode(data, type=shape)
    except RecursionError:
        raise InvalidMessage("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidMessage("the body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        raise invalid_body(error, data, shape) from None
