"""Whether a client may open a WebSocket; a refusal is an HTTP response.

Checked in this order: the address's rate, the form of the request, path, drain, origin,
credential, device, revocation, the user's rate, the number of connections. The rate
comes first, so that every handshake counts, whatever is wrong with it.
"""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from holdfast.access.connection_limits import ConnectionCounts
from holdfast.access.network import (
    Network,
    client_ip,
    joined_headers,
    origin_allowed,
    repeated_header,
)
from holdfast.access.principal import Principal, bearer
from holdfast.drivers.cluster import missing_role
from holdfast.errors import (
    Forbidden,
    HoldfastError,
    InvalidMessage,
    NotFound,
    RateLimited,
    Unauthorized,
    Unavailable,
)
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.http import PROBLEM_TYPE, problem, rate_limit_headers, refusing
from holdfast.message import User, check_id
from holdfast.wire.codec import error_payload
from holdfast.wire.frames import BEARER_SUBPROTOCOL, SUBPROTOCOL

PATH = "/v1/ws"
_NOBODY = User("", "")
KEY = b"sec-websocket-key"
SUBPROTOCOLS_MAX = 16
"""A client needs two: one names the protocol, one carries the token. More: 400."""
RETURN_SECONDS = 5
"""Retry-After where the number of connections is exhausted."""


class _WrongVersion(InvalidMessage):
    """426: the client speaks another version of WebSocket."""


STATUS: Sequence[tuple[type[HoldfastError], HTTPStatus]] = (
    (NotFound, HTTPStatus.NOT_FOUND),
    (Unauthorized, HTTPStatus.UNAUTHORIZED),
    (Forbidden, HTTPStatus.FORBIDDEN),
    (RateLimited, HTTPStatus.TOO_MANY_REQUESTS),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (_WrongVersion, HTTPStatus.UPGRADE_REQUIRED),
    (InvalidMessage, HTTPStatus.BAD_REQUEST),
)


class UpgradeRequest(NamedTuple):
    """A request that asks for a WebSocket. Header names are in lower case."""

    method: str
    http_version: str
    path: str
    query: str
    headers: Sequence[tuple[bytes, bytes]]


class ConnectionSlot:
    """One of the counted connections, from its handshake to its end."""

    __slots__ = ("_address", "_handshake", "_tenant")

    def __init__(self, handshake: Handshake, address: str, tenant: str) -> None:
        self._handshake = handshake
        self._address = address
        self._tenant = tenant

    def identify(self, principal: Principal) -> None:
        """Refuse, as the handshake would, a principal named by the first frame."""
        self._handshake.ask_rules(principal.user, self._address)
        if full := self._handshake.counts.identify(principal.tenant):
            raise Unavailable(full, retry_after_seconds=RETURN_SECONDS)
        self._tenant = principal.tenant

    def leave(self) -> None:
        self._handshake.counts.close(self._address, self._tenant)


@dataclass(frozen=True, slots=True)
class AcceptedHandshake:
    """An accepted client. Without a principal its first frame must authenticate."""

    principal: Principal | None
    device_id: str
    slot: ConnectionSlot
    subprotocol: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """The HTTP response to a handshake that is not accepted."""

    status: HTTPStatus
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Handshake:
    """Decides handshakes. ``draining``: this node is shutting down and accepts none."""

    verify: Callable[[str], Principal]
    counts: ConnectionCounts
    origins: Collection[str]
    proxies: Collection[Network]
    draining: Callable[[], bool]
    is_gateway: bool = True
    """Whether this node has the role; without it no connection is accepted."""
    rules: EntryPoints | None = None
    legacy_rate_limit_headers: bool = False
    """Also send the older header names, as REST does."""
    refusal: Callable[[Principal, str], HoldfastError | None] = lambda principal, device_id: None
    """Why this principal and device are cut off (revoked); None if they are not."""

    def decide(self, request: UpgradeRequest, peer: str) -> AcceptedHandshake | Refusal:
        try:
            return self._admit(request, peer)
        except HoldfastError as error:
            return refused_with(error, legacy=self.legacy_rate_limit_headers)

    def _admit(self, request: UpgradeRequest, peer: str) -> AcceptedHandshake:
        joined, repeated = joined_headers(request.headers)
        headers = {name: value.decode("latin-1") for name, value in joined.items()}
        address = client_ip(peer, headers.get(b"x-forwarded-for", ""), self.proxies)
        self.ask_rules(_NOBODY, address)
        _check_form(request, headers, repeated)
        if request.path != PATH:
            raise NotFound(f"there is no WebSocket at this path; use {PATH}")
        if not self.is_gateway:
            raise missing_role("gateway")
        if self.draining():
            raise Unavailable("this node is shutting down", retry_after_seconds=1)
        if not origin_allowed(headers.get(b"origin"), self.origins):
            raise Forbidden(
                "pages of this origin may not connect; add it to server.allowed_origins"
            )
        if "token=" in request.query:
            raise Unauthorized(
                "a token must not be in a URL: use the Authorization header or a subprotocol"
            )
        offered = [
            name.strip()
            for name in headers.get(b"sec-websocket-protocol", "").split(",", SUBPROTOCOLS_MAX)
        ]
        if len(offered) > SUBPROTOCOLS_MAX:
            raise InvalidMessage(f"at most {SUBPROTOCOLS_MAX} subprotocols may be offered")
        credential = bearer(headers.get(b"authorization")) or _token_among(offered)
        principal = self.verify(credential) if credential else None
        device_id = headers.get(b"x-device-id", "")
        if device_id and (problem := check_id(device_id, "X-Device-ID")):
            raise InvalidMessage(problem)
        if principal is not None and (refusal := self.refusal(principal, device_id)) is not None:
            raise refusal
        user = principal.user if principal else _NOBODY
        if principal:
            self.ask_rules(user, address)
        if full := self.counts.open(address, user.tenant):
            raise Unavailable(full, retry_after_seconds=RETURN_SECONDS)
        return AcceptedHandshake(
            principal, device_id, ConnectionSlot(self, address, user.tenant), SUBPROTOCOL in offered
        )

    def ask_rules(self, user: User, address: str) -> None:
        """Ask the rules ``connect:*``; raises RateLimited.

        Before the credential is known they count the address, then the user.
        """
        if self.rules is not None and (refused := self.rules.ask_at_once("connect", user, address)):
            raise refused


def _check_form(
    request: UpgradeRequest, headers: Mapping[bytes, str], repeated: Sequence[bytes]
) -> None:
    """Raise InvalidMessage unless this is an opening handshake (RFC 6455, 4.2.1)."""
    if (name := repeated_header(repeated)) is not None:
        raise InvalidMessage(f"the header {name} was given more than once", field=name)
    if request.method != "GET":
        raise InvalidMessage("a WebSocket is opened with GET")
    if request.http_version != "1.1":
        raise InvalidMessage("a WebSocket is opened with HTTP/1.1")
    if headers.get(b"sec-websocket-version") != "13":
        raise _WrongVersion("only version 13 of WebSocket is spoken here")
    try:
        key = b64decode(headers.get(KEY, ""), validate=True)
    except ValueError:
        key = b""
    if len(key) != 16:
        raise InvalidMessage("Sec-WebSocket-Key must be 16 bytes in base64")


def _token_among(offered: Sequence[str]) -> str | None:
    return next(
        (p.removeprefix(BEARER_SUBPROTOCOL) for p in offered if p.startswith(BEARER_SUBPROTOCOL)),
        None,
    )


def refused_with(error: HoldfastError, *, legacy: bool = False) -> Refusal:
    """The HTTP response for this error."""
    status = next(
        (s for kind, s in STATUS if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR
    )
    headers = {"Content-Type": "application/json"}
    body: dict[str, Any] = {"error": error_payload(error)}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_seconds))
    if status is HTTPStatus.UPGRADE_REQUIRED:
        headers["Sec-WebSocket-Version"] = "13"
    if status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RateLimited):
        decisions = refusing(error)
        headers |= {
            "Content-Type": PROBLEM_TYPE,
            **dict(rate_limit_headers(decisions, legacy=legacy)),
        }
        body |= {**problem(decisions), "detail": error.message}
    return Refusal(status, headers, msgspec.json.encode(body))
