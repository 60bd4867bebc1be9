"""Around every request: its id, its security headers, its metrics and its line in the access log."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast import telemetry
from holdfast.access.principal import Principal
from holdfast.api.call import Endpoint
from holdfast.api.deps import Deps
from holdfast.api.receive import address_of
from holdfast.limits.answers import rate_limit_headers

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
PROBED = frozenset({"/health/live", "/health/ready", "/metrics"})


class Envelope:
    """ASGI middleware. A view may set a header of its own; what it does not set is set here."""

    def __init__(self, app: ASGIApp, deps: Deps) -> None:
        self._app = app
        self._deps = deps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = self._deps.clock.monotonic()
        request_id = self._deps.ids.new("req_")
        status, settings = 500, self._deps.settings

        async def send_enveloped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                decisions = scope.get("holdfast.decisions", ())
                for name, value in rate_limit_headers(decisions, legacy=settings.legacy_rate_limit_headers):
                    headers[name] = value
            await send(message)

        try:
            await self._app(scope, receive, send_enveloped)
        finally:
            self._note(scope, request_id, status, self._deps.clock.monotonic() - began)

    def _note(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        """What is logged is chosen here by name: never a header, a query or a body, so never a secret."""
        endpoint: Endpoint | None = scope.get("holdfast.endpoint")
        principal: Principal | None = scope.get("holdfast.principal")
        telemetry.request_answered(endpoint.name if endpoint else "none", status, seconds)
        # What machines ask every few seconds would bury what people did.
        note = telemetry.log.debug if scope["path"] in PROBED and status < 400 else telemetry.log.info
        note(
            "request",
            request_id=request_id,
            method=scope["method"],
            path=scope["path"],
            status=status,
            milliseconds=round(seconds * 1000, 1),
            address=address_of(Request(scope), self._deps),
            tenant=principal.tenant if principal else None,
            user=principal.user_id if principal else None,
            kind=principal.kind if principal else None,
        )
