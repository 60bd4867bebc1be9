"""The table of endpoints as an ASGI application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from holdfast import telemetry
from holdfast.api.cors import CrossOrigin
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Endpoint
from holdfast.api.idempotency import IdempotentRequests
from holdfast.api.middleware import AccessLog, Answered, response_headers
from holdfast.api.openapi import describe
from holdfast.api.pages import StaticPage
from holdfast.api.reference import STYLE, html_page
from holdfast.api.request import (
    AsgiApp,
    AsgiReceive,
    AsgiScope,
    AsgiSend,
    Request,
    Response,
    View,
    address_of,
    receive,
    violated,
)
from holdfast.api.responses import respond, respond_error
from holdfast.api.routes import ALIASES, ENDPOINTS, GROUPS
from holdfast.api.routing import Routes
from holdfast.api.strangers import Strangers
from holdfast.errors import (
    HoldfastError,
    InternalError,
    InvalidMessage,
    NotFound,
    OperatorError,
    RateLimited,
)
from holdfast.telemetry import log

_SAFE = ("GET", "HEAD", "OPTIONS")
_DOCS_POLICY = "default-src 'none'; style-src 'self'; frame-ancestors 'none'"


def make_app(deps: ApiDeps, strangers: Strangers) -> AsgiApp:
    """The REST application over ``deps``.

    Its only state: the keys of running requests.
    """
    keyed = IdempotentRequests(deps)
    endpoints = [_opened(endpoint, deps) for endpoint in ENDPOINTS]
    by_path: dict[str, dict[str, View]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = _view(
            deps, strangers, keyed, endpoint
        )
    for path, page in _pages(endpoints).items():
        by_path[path] = {"GET": _for_anybody(deps, strangers, page.view)}
    for views in by_path.values():
        if "GET" in views:
            views["HEAD"] = views["GET"]
    return _Application(deps, strangers, Routes(by_path)).serve


class _Application:
    """Serves a request: route, view, headers, access log."""

    def __init__(
        self, deps: ApiDeps, strangers: Strangers, routes: Routes[dict[str, View]]
    ) -> None:
        self._deps = deps
        self._access_log = AccessLog(deps)
        self._otherwise = _for_anybody(deps, strangers, self._refuse)
        self._routes = routes
        self._cross_origin = CrossOrigin(deps.origins, {endpoint.method for endpoint in ENDPOINTS})

    async def serve(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """An ASGI application for HTTP only: the gateway has WebSockets.

        No lifespan.
        """
        deps, status = self._deps, 500
        began, request_id = deps.clock.monotonic(), deps.ids.new("req_")
        request = Request(scope, receive)
        request.path = ALIASES.get(request.path, request.path)
        try:
            response = await self._respond(request)
            status = response.status
            headers = response_headers(
                response, request, request_id, legacy=deps.settings.legacy_rate_limit_headers
            )
            headers += self._cross_origin.headers(request)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": response.body})
        finally:
            self._access_log.note(
                request, Answered(request_id, status, deps.clock.monotonic() - began)
            )

    async def _respond(self, request: Request) -> Response:
        found = self._routes.find(request.path)
        if found is None:
            return await self._otherwise(request)
        views, request.path_params = found
        return await views.get(request.method, self._otherwise)(request)

    async def _refuse(self, request: Request) -> Response:
        """Answer what no endpoint does: a CORS preflight, a wrong method or path."""
        if (preflight := self._cross_origin.preflight(request)) is not None:
            return preflight
        write = request.method not in _SAFE
        found = self._routes.find(request.path)
        if found is None:
            return respond_error(NotFound("there is nothing here; see /docs"), write=write)
        method, allowed = request.method[:16], ", ".join(sorted(found[0]))
        refusal = InvalidMessage(f"{method} is not allowed here, only {allowed}", method=method)
        response = respond_error(refusal, write=write, status=405)
        return response._replace(headers={**response.headers, "Allow": allowed})


def _for_anybody(deps: ApiDeps, strangers: Strangers, view: View) -> View:
    """A view that ignores credentials and counts requests by address."""

    async def counted(request: Request) -> Response:
        try:
            strangers.asked(address_of(request, deps), request.path)
        except RateLimited as error:
            return respond_error(
                error, write=request.method not in _SAFE, violated=violated(request, error)
            )
        return await view(request)

    return counted


def _opened(endpoint: Endpoint, deps: ApiDeps) -> Endpoint:
    """The endpoint, opened to anybody if the settings say so."""
    if endpoint.path == "/metrics" and deps.settings.metrics_without_key:
        return replace(endpoint, caller="anybody", scope=None)
    return endpoint


def _view(
    deps: ApiDeps, strangers: Strangers, keyed: IdempotentRequests, endpoint: Endpoint
) -> View:
    """The endpoint as a view. Every error becomes an answer of the usual shape."""

    async def view(request: Request) -> Response:
        request.endpoint = endpoint
        if not endpoint.path.startswith("/admin"):
            return await answer(request)
        attributes = {"http.request.method": endpoint.method, "http.route": endpoint.path}
        carried = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in request.headers.items()
        }
        with telemetry.span(endpoint.name, attributes, carried) as span:
            response = await answer(request)
            span.tell("http.response.status_code", response.status)
            if response.status >= 500:
                span.fail(str(response.status))
            return response

    async def answer(request: Request) -> Response:
        try:
            call = await receive(deps, strangers, endpoint, request)
            return respond(await keyed.run(endpoint, call), endpoint.status)
        except HoldfastError as error:
            if error.private:
                defect = not isinstance(error, OperatorError)  # its text says more than a traceback
                log.error(
                    "api.request_failed", endpoint=endpoint.name, error=str(error), exc_info=defect
                )
            operator = endpoint.caller == "operator"
            rules = violated(request, error) if isinstance(error, RateLimited) else ()
            return respond_error(error, write=endpoint.writes, to_operator=operator, violated=rules)
        except Exception:
            log.exception("api.request_failed", endpoint=endpoint.name)
            return respond_error(InternalError(), write=endpoint.writes)

    return view


def _pages(endpoints: Sequence[Endpoint]) -> Mapping[str, StaticPage]:
    """The static pages: OpenAPI and the reference."""
    policy = {"Content-Security-Policy": _DOCS_POLICY}
    return {
        "/openapi.json": StaticPage(
            "application/json", lambda: msgspec.json.encode(describe(endpoints))
        ),
        "/docs": StaticPage("text/html; charset=utf-8", lambda: html_page(GROUPS), policy),
        "/docs/style.css": StaticPage("text/css; charset=utf-8", lambda: STYLE),
    }
