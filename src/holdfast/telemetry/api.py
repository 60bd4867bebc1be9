"""REST: requests."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Histogram

from holdfast.telemetry.metrics import counter, histogram

_requests = counter("api_requests", "REST requests answered, by endpoint and status", ("endpoint", "status"))
_request_seconds = histogram("api_request_seconds", "From a REST request to its answer", ("endpoint",))


def request_answered(endpoint: str, status: int, seconds: float) -> None:
    """``endpoint`` is a name of the table of endpoints, or "none"."""
    _answered(endpoint, status).inc()
    _seconds(endpoint).observe(seconds)


@cache
def _answered(endpoint: str, status: int) -> Counter:
    """Found once: looking a metric up by its labels takes longer than counting."""
    return _requests.labels(endpoint, str(status))


@cache
def _seconds(endpoint: str) -> Histogram:
    return _request_seconds.labels(endpoint)
