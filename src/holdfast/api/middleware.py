"""What every answer gets: request id, security headers, metrics, an access log line."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from holdfast import telemetry
from holdfast.api.deps import ApiDeps
from holdfast.api.request import NOBODY, RawHeaders, Request, address_of
from holdfast.api.responses import Response
from holdfast.api.streaming import StreamEnd
from holdfast.limits.http import rate_limit_headers

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_SECURITY = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
PROBED = frozenset({"/health/live", "/health/ready", "/metrics"})
NO_BODY = frozenset({204, 304})


class Answered(NamedTuple):
    """How a request ended."""

    request_id: str
    status: int
    seconds: float
    stream_end: StreamEnd | None = None


def response_headers(
    response: Response, request: Request, request_id: str, *, legacy: bool
) -> RawHeaders:
    """The headers of an answer; headers that the endpoint set take precedence."""
    headers = [(b"x-request-id", request_id.encode())]
    if response.status not in NO_BODY and isinstance(response.body, bytes):
        headers.append((b"content-length", b"%d" % len(response.body)))
    if response.body:
        headers.append((b"content-type", response.media_type.encode()))
    if response.headers:
        own = [
            (name.lower().encode(), value.encode("latin-1"))
            for name, value in response.headers.items()
        ]
        names = {name for name, _ in own}
        headers += own
        headers += [header for header in _SECURITY if header[0] not in names]
    else:
        headers += _SECURITY
    if request.decisions:
        sent = rate_limit_headers(request.decisions, legacy=legacy)
        headers += [(name.lower().encode(), value.encode()) for name, value in sent]
    return headers


class AccessLog:
    """Counts every answer and logs it; for strangers, who could fill the log, only
    some.

    Fields are chosen by name: never a header, a query or a body, so never a secret.
    """

    def __init__(self, deps: ApiDeps) -> None:
        self._deps = deps
        self._log = telemetry.log.bind()  # bound once, not for each line
        self._anonymous_log = telemetry.ThrottledLog()

    def note(self, request: Request, answered: Answered) -> None:
        """A request was answered."""
        principal = request.principal
        name = request.endpoint.name if request.endpoint else "none"
        streamed = answered.stream_end is not None
        telemetry.request_answered(name, answered.status, None if streamed else answered.seconds)
        write = (
            self._anonymous_log.info if principal is None or principal is NOBODY else self._log.info
        )
        if request.path in PROBED and answered.status < 400:
            write = self._log.debug  # probes every few seconds would hide the rest
        if streamed:
            write = partial(write, stream_end=answered.stream_end)
        write(
            "api.request_answered",
            request_id=answered.request_id,
            method=request.method,
            path=request.path,
            status=answered.status,
            milliseconds=round(answered.seconds * 1000, 1),
            address=address_of(request, self._deps),
            tenant=principal.tenant if principal else None,
            user=principal.user_id if principal else None,
            kind=principal.kind if principal else None,
        )
