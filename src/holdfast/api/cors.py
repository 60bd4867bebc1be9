"""CORS: pages of listed origins may call. No cookies, so no credentials are shared."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.api.request import RawHeaders, Request
from holdfast.api.responses import Response, respond_error
from holdfast.errors import Forbidden

ALLOWED_HEADERS = (
    "Accept",
    "Accept-Language",
    "Authorization",
    "Content-Language",
    "Content-Type",
    "Idempotency-Key",
    "Last-Event-ID",
    "Prefer",
    "X-Act-As",
    "X-API-Key",
)
EXPOSED_HEADERS = (
    "Retry-After",
    "X-Request-ID",
    "Idempotency-Replayed",
    "RateLimit",
    "RateLimit-Policy",
    "X-Reply-Id",
)
PREFLIGHT_SECONDS = 600
"""How long a browser may cache the answer to a preflight."""
_ALLOWED = frozenset(name.lower() for name in ALLOWED_HEADERS)


class CrossOrigin:
    """Answers preflights, and marks every other answer with who may read it."""

    def __init__(self, origins: Collection[str], methods: Collection[str]) -> None:
        self._origins = origins
        self._methods = sorted(methods)

    def preflight(self, request: Request) -> Response | None:
        """The answer to a preflight; None if the request is not one."""
        method = request.header(b"access-control-request-method")
        if (
            not self._origins
            or request.method != "OPTIONS"
            or b"origin" not in request.headers
            or method is None
        ):
            return None
        asked = (request.header(b"access-control-request-headers") or "").lower().split(",")
        if request.header(b"origin") not in self._origins:
            return respond_error(Forbidden("pages of this origin may not call"), write=False)
        if method not in self._methods or not {name.strip() for name in asked} - {""} <= _ALLOWED:
            return respond_error(
                Forbidden("pages may not use this method or one of these headers"), write=False
            )
        allowed = {
            "Access-Control-Allow-Methods": ", ".join(self._methods),
            "Access-Control-Allow-Headers": ", ".join(ALLOWED_HEADERS),
            "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        }
        return Response(200, headers=allowed)

    def headers(self, request: Request) -> RawHeaders:
        """The CORS headers of an ordinary answer."""
        origin = request.headers.get(b"origin")
        if origin is None or origin.decode("latin-1") not in self._origins:
            return []
        exposed = (b"access-control-expose-headers", ", ".join(EXPOSED_HEADERS).encode())
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin"), exposed]
