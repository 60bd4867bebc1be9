"""The table of endpoints and pages as an ASGI application."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from holdfast import telemetry
from holdfast.api.address_limits import AddressLimits
from holdfast.api.cors import CrossOrigin
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Call, Endpoint, WebPage
from holdfast.api.idempotency import IdempotentRequests
from holdfast.api.middleware import AccessLog, Answered, response_headers
from holdfast.api.request import (
    AsgiReceive,
    AsgiScope,
    AsgiSend,
    RawHeaders,
    Request,
    address_of,
    receive,
    violated,
)
from holdfast.api.responses import PageResponses, Response, View, respond, respond_error
from holdfast.api.routes import ALIASES, ENDPOINTS, PAGES
from holdfast.api.streaming import StreamedAnswers, StreamedBody, StreamEnd
from holdfast.drivers.cluster import missing_role
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
_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")
T = TypeVar("T")


class RestApp:
    """The REST application over ``deps``: route, view, headers, access log.

    Its only state: the keys of running requests, and the open streams.
    """

    def __init__(
        self,
        deps: ApiDeps,
        address_limits: AddressLimits,
        endpoints: Sequence[Endpoint] = ENDPOINTS,
        pages: Sequence[WebPage] = PAGES,
    ) -> None:
        self._deps = deps
        self._address_limits = address_limits
        self._keyed = IdempotentRequests(deps)
        self._streams = StreamedAnswers()
        self._access_log = AccessLog(deps)
        self._refuse_otherwise = self._for_anybody(self._refuse)
        endpoints = [_opened(endpoint, deps) for endpoint in endpoints]
        self._routes = Routes(self._views(endpoints, pages))
        self._cross_origin = CrossOrigin(deps.origins, {endpoint.method for endpoint in endpoints})

    def _views(
        self, endpoints: Sequence[Endpoint], pages: Sequence[WebPage]
    ) -> dict[str, dict[str, View]]:
        views: dict[str, dict[str, View]] = {}
        for endpoint in endpoints:
            by_method = views.setdefault(endpoint.path, {})
            by_method[endpoint.method] = view = self._view(endpoint)
            if endpoint.method == "GET" and endpoint.stream is None:
                by_method["HEAD"] = view
        for page in pages:
            view = self._for_anybody(PageResponses(page, endpoints).respond)
            views[page.path] = {"GET": view, "HEAD": view}
        return views

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """An ASGI application for HTTP only: the gateway has WebSockets.

        No lifespan. Raises ConnectionAbortedError if a streamed answer was cut: the
        server then closes the connection, so that the client sees it.
        """
        deps, status = self._deps, 500
        began, request_id = deps.clock.monotonic(), deps.ids.new("req_")
        request = Request(scope, receive)
        request.path = ALIASES.get(request.path, request.path)
        stream_end: StreamEnd | None = None
        try:
            response = await self._respond(request)
            status, body = response.status, response.body
            if isinstance(body, StreamedBody):
                stream_end = "failed"
                headers = self._headers(response, request, request_id)
                request.forget_headers()
                body.start(status, headers, send)
                del headers, response  # thousands of answers may wait
                stream_end = await self._streams.wait(body)
            else:
                headers = self._headers(response, request, request_id)
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": body})
        finally:
            seconds = deps.clock.monotonic() - began
            self._access_log.note(request, Answered(request_id, status, seconds, stream_end))
        if stream_end not in (None, "complete", "client_gone"):
            raise ConnectionAbortedError(stream_end)

    def _headers(self, response: Response, request: Request, request_id: str) -> RawHeaders:
        legacy = self._deps.settings.legacy_rate_limit_headers
        headers = response_headers(response, request, request_id, legacy=legacy)
        return headers + self._cross_origin.headers(request)

    async def drain(self) -> None:
        """Refuse new streams and return when the running ones have ended."""
        await self._streams.drain()

    async def _respond(self, request: Request) -> Response:
        found = self._routes.find(request.path)
        if found is None:
            return await self._refuse_otherwise(request)
        views, request.path_params = found
        return await views.get(request.method, self._refuse_otherwise)(request)

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

    def _for_anybody(self, view: View) -> View:
        """A view that ignores credentials and counts requests by address."""

        async def counted(request: Request) -> Response:
            try:
                self._address_limits.count_request(address_of(request, self._deps), request.path)
            except RateLimited as error:
                return respond_error(
                    error, write=request.method not in _SAFE, violated=violated(request, error)
                )
            return await view(request)

        return counted

    def _view(self, endpoint: Endpoint) -> View:
        """The endpoint as a view; the endpoints of operators are traced."""

        async def view(request: Request) -> Response:
            request.endpoint = endpoint
            if not endpoint.path.startswith("/admin"):
                return await self._answer(endpoint, request)
            attributes = {"http.request.method": endpoint.method, "http.route": endpoint.path}
            carried = {
                name.decode("latin-1"): value.decode("latin-1")
                for name, value in request.headers.items()
            }
            with telemetry.span(endpoint.name, attributes, carried) as span:
                response = await self._answer(endpoint, request)
                span.set_attribute("http.response.status_code", response.status)
                if response.status >= 500:
                    span.fail(str(response.status))
                return response

        return view

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        """Run the endpoint. Every error becomes an answer of the usual shape."""
        try:
            if endpoint.role is not None and endpoint.role not in self._deps.roles:
                raise missing_role(endpoint.role)
            call = await self._receive(endpoint, request)
            if endpoint.stream is not None:
                self._streams.refuse_if_draining()
            answer = await self._keyed.run(endpoint, call)
            if endpoint.stream is not None and isinstance(answer.body, AsyncIterator):
                bounds, seconds_left = answer.stream or endpoint.stream, call.seconds_left
                del call  # its body may have megabytes, and the answer may take minutes
                body = await self._streams.begin(seconds_left, answer.body, bounds, request)
                status = answer.status or endpoint.status
                return Response(status, body, answer.media_type, answer.headers)
            return respond(answer, endpoint.status)
        except HoldfastError as error:
            if error.private:
                defect = not isinstance(error, OperatorError)  # its text says more than a traceback
                log.error(
                    "api.request_failed", endpoint=endpoint.name, error=str(error), exc_info=defect
                )
            operator = endpoint.caller == "operator"
            rules = violated(request, error) if isinstance(error, RateLimited) else ()
            return respond_error(
                error,
                write=endpoint.writes,
                to_operator=operator,
                violated=rules,
                shape=endpoint.error_shape,
            )
        except Exception:
            log.exception("api.request_failed", endpoint=endpoint.name)
            return respond_error(InternalError(), write=endpoint.writes, shape=endpoint.error_shape)

    async def _receive(self, endpoint: Endpoint, request: Request) -> Call:
        draining = self._streams.draining
        try:
            return await receive(self._deps, self._address_limits, draining, endpoint, request)
        except Exception as error:
            if endpoint.on_refused is not None and request.principal is not None:
                endpoint.on_refused(error)
            raise


def _opened(endpoint: Endpoint, deps: ApiDeps) -> Endpoint:
    """The endpoint, opened to anybody if the settings say so."""
    if endpoint.path == "/metrics" and deps.settings.metrics_without_key:
        return replace(endpoint, caller="anybody", scope=None)
    return endpoint


class Routes(Generic[T]):
    """Maps paths to views. ``{name}`` matches one segment, ``{name:path}`` the rest."""

    def __init__(self, by_path: Mapping[str, T]) -> None:
        self._exact = {path: found for path, found in by_path.items() if "{" not in path}
        self._patterns = [(_pattern(path), found) for path, found in by_path.items() if "{" in path]

    def find(self, path: str) -> tuple[T, Mapping[str, str]] | None:
        """The view of a path and its parameters; None if there is none."""
        exact = self._exact.get(path)
        if exact is not None:
            return exact, {}
        for pattern, found in self._patterns:
            if match := pattern.fullmatch(path):
                return found, match.groupdict()
        return None


def _pattern(path: str) -> re.Pattern[str]:
    pieces, at = [], 0
    for parameter in _PARAMETER.finditer(path):
        pieces.append(re.escape(path[at : parameter.start()]))
        pieces.append(f"(?P<{parameter[1]}>{'.*' if parameter[2] else '[^/]+'})")
        at = parameter.end()
    return re.compile("".join(pieces) + re.escape(path[at:]), re.DOTALL)
