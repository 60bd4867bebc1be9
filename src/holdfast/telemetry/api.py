"""REST: requests."""

from __future__ import annotations

from holdfast.telemetry.metrics import counter, histogram

_requests = counter("api_requests", "REST requests answered, by endpoint and status", ("endpoint", "status"))
_request_seconds = histogram("api_request_seconds", "From a REST request to its answer", ("endpoint",))


def request_answered(endpoint: str, status: int, seconds: float) -> None:
    """``endpoint`` is a name of the table of endpoints, or "none"."""
    _requests.labels(endpoint, str(status)).inc()
    _request_seconds.labels(endpoint).observe(seconds)
