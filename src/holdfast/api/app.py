"""The ASGI application: the table of endpoints, mounted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast import telemetry
from holdfast.api.answers import respond, respond_error
from holdfast.api.call import Endpoint
from holdfast.api.deps import Deps
from holdfast.api.envelope import Envelope
from holdfast.api.keyed import Keyed
from holdfast.api.openapi import describe
from holdfast.api.receive import FailedLogins, receive, violated
from holdfast.api.reference import STYLE, html_page
from holdfast.api.routes import ENDPOINTS, GROUPS
from holdfast.errors import HoldfastError, InternalError, InvalidMessage, NotFound, RateLimited
from holdfast.telemetry import log

View = Callable[[Request], Awaitable[Response]]
_SAFE = ("GET", "HEAD", "OPTIONS")
_DOCS_POLICY = "default-src 'none'; style-src 'self'; frame-ancestors 'none'"


def make_app(deps: Deps) -> Starlette:
    """The REST surface over ``deps``. Holds no state but failed logins and the keys of what runs now."""
    failed_logins, keyed = FailedLogins(deps.settings, deps.clock), Keyed(deps)
    endpoints = [_opened(endpoint, deps) for endpoint in ENDPOINTS]
    by_path: dict[str, dict[str, View]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = _view(deps, failed_logins, keyed, endpoint)
    routes = [_route(path, views) for path, views in by_path.items()]
    app = Starlette(
        routes=routes + _pages(endpoints),
        middleware=[Middleware(Envelope, deps=deps), *_cross_origin(deps)],
        exception_handlers={HTTPException: _no_such_thing},
    )
    app.router.redirect_slashes = False
    return app


def _opened(endpoint: Endpoint, deps: Deps) -> Endpoint:
    """The endpoint as the settings have it."""
    if endpoint.path == "/metrics" and deps.settings.metrics_without_key:
        return replace(endpoint, caller="anybody", scope=None)
    return endpoint


def _view(deps: Deps, failed_logins: FailedLogins, keyed: Keyed, endpoint: Endpoint) -> View:
    """The endpoint as Starlette calls it. Whatever happens, there is an answer of the usual shape."""

    async def view(request: Request) -> Response:
        request.scope["holdfast.endpoint"] = endpoint
        if not endpoint.path.startswith("/admin"):
            return await answer(request)
        attributes = {"http.request.method": endpoint.method, "http.route": endpoint.path}
        with telemetry.span(endpoint.name, attributes, request.headers) as span:
            response = await answer(request)
            span.tell("http.response.status_code", response.status_code)
            if response.status_code >= 500:
                span.fail(str(response.status_code))
            return response

    async def answer(request: Request) -> Response:
        try:
            call = await receive(deps, failed_logins, endpoint, request)
            return respond(await keyed.run(endpoint, call), endpoint.status)
        except HoldfastError as error:
            if error.private:
                log.error("a request met a defect, or an operator's trouble", endpoint=endpoint.name, exc_info=True)
            operator = endpoint.caller == "operator"
            rules = violated(request, error) if isinstance(error, RateLimited) else ()
            return respond_error(error, write=endpoint.writes, to_operator=operator, violated=rules)
        except Exception:
            log.exception("a request met a defect", endpoint=endpoint.name)
            return respond_error(InternalError(), write=endpoint.writes)

    return view


def _route(path: str, views: Mapping[str, View]) -> Route:
    """One route per path, so that a 405 names every method the path has."""

    async def dispatch(request: Request) -> Response:
        return await views["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, dispatch, methods=list(views))


def _pages(endpoints: Sequence[Endpoint]) -> list[Route]:
    """The description for machines and for people, made when first asked for."""

    @cache
    def description() -> bytes:
        return msgspec.json.encode(describe(endpoints))

    @cache
    def page() -> bytes:
        return html_page(GROUPS)

    async def openapi(request: Request) -> Response:
        return Response(description(), media_type="application/json")

    async def docs(request: Request) -> Response:
        return Response(page(), media_type="text/html", headers={"Content-Security-Policy": _DOCS_POLICY})

    async def style(request: Request) -> Response:
        return Response(STYLE, media_type="text/css")

    return [Route("/openapi.json", openapi), Route("/docs", docs), Route("/docs/style.css", style)]


def _cross_origin(deps: Deps) -> list[Middleware]:
    """Pages of listed origins may call; cookies play no part, so there are no credentials to share."""
    if not deps.origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=sorted(deps.origins),
            allow_methods=sorted({endpoint.method for endpoint in ENDPOINTS}),
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key", "X-Act-As"],
            expose_headers=["Retry-After", "X-Request-ID", "Idempotency-Replayed", "RateLimit", "RateLimit-Policy"],
        )
    ]


async def _no_such_thing(request: Request, error: Exception) -> Response:
    """404 and 405 in the shape of every other error."""
    assert isinstance(error, HTTPException)
    write = request.method not in _SAFE
    if error.status_code == 404:
        return respond_error(NotFound("there is nothing here; see /docs"), write=write)
    allowed = (error.headers or {}).get("Allow", "")
    refusal = InvalidMessage(f"{request.method[:16]} is not allowed here, only {allowed}", method=request.method[:16])
    response = respond_error(refusal, write=write, status=error.status_code)
    response.headers.update(error.headers or {})
    return response
