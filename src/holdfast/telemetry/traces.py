"""Spans for OpenTelemetry. Unless configured, a span does nothing and no library loads.

Attributes are closed sets like the labels of metrics: never a tenant, a resource, a
user, a chat or a token. A span that ends with an error carries its code; it is marked
as failed only if the fault is ours, because a caller's mistake is a normal answer.

A thread of the SDK sends spans from a queue of ``QUEUE_MAX``; a full queue drops them,
and no caller waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from holdfast.errors import HoldfastError, Refused, extra

Value = str | int | bool
QUEUE_MAX = 2048
EXPORT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where spans go. An ``endpoint`` needs the extra ``otel``."""

    endpoint: str = ""
    """An OTLP collector over HTTP (``http://127.0.0.1:4318/v1/traces``). Empty: no
    traces, and no cost.
    """
    sample_ratio: float = 1.0
    """The part of the traces that begin here to keep. The decision of a caller that
    sends ``traceparent`` is followed.
    """
    service_name: str = "holdfast"
    """What the collector calls this server; the node's id comes beside it."""

    def __post_init__(self) -> None:
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError("endpoint must be an http:// or https:// URL of an OTLP collector")
        if not 0 <= self.sample_ratio <= 1:
            raise ValueError("sample_ratio must be between 0 and 1")
        if not self.service_name:
            raise ValueError("service_name must not be empty")


class Span:
    """A span that records nothing; ``_Recorded`` does."""

    def set_attribute(self, name: str, value: Value) -> None:
        """Set an attribute, named by OpenTelemetry's conventions if they have it."""

    def fail(self, code: str) -> None:
        """Mark the span as failed; not for a caller's mistake."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None: ...


_NOTHING = Span()
_tracer: Any = None


def span(
    name: str, attributes: Mapping[str, Value], headers: Mapping[str, str] | None = None
) -> Span:
    """A span for a ``with``. ``headers`` of a request may carry the caller's trace."""
    return _NOTHING if _tracer is None else _Recorded(name, attributes, headers)


class _Recorded(Span):
    def __init__(
        self, name: str, attributes: Mapping[str, Value], headers: Mapping[str, str] | None
    ) -> None:
        from opentelemetry.propagate import extract

        self._running = _tracer.start_as_current_span(
            name,
            context=extract(headers) if headers is not None else None,
            attributes=dict(attributes),
            record_exception=False,
            set_status_on_exception=False,
        )

    def set_attribute(self, name: str, value: Value) -> None:
        self._span.set_attribute(name, value)

    def fail(self, code: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR, code)

    def __enter__(self) -> Self:
        self._span = self._running.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            code = error.code if isinstance(error, HoldfastError) else type(error).__name__
            self.set_attribute("error.type", code)
            if not isinstance(error, Refused):
                self.fail(code)
        self._running.__exit__(None, None, None)


@contextmanager
def tracing(settings: TraceSettings, node_id: str, exporter: Any = None) -> Iterator[None]:
    """Record spans while the block runs, and send the rest at its end.

    ``exporter`` replaces the OTLP one. BadSetting if the library is not installed.
    """
    global _tracer
    if not settings.endpoint and exporter is None:
        yield
        return
    provider = _provider(settings, node_id, exporter)
    _tracer = provider.get_tracer("holdfast")
    try:
        yield
    finally:
        _tracer = None
        provider.shutdown()


def _provider(settings: TraceSettings, node_id: str, exporter: Any) -> Any:
    with extra("otel"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(settings.sample_ratio),
        resource=Resource.create(
            {"service.name": settings.service_name, "service.instance.id": node_id}
        ),
        shutdown_on_exit=False,
    )
    chosen = exporter or OTLPSpanExporter(endpoint=settings.endpoint, timeout=EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(chosen, max_queue_size=QUEUE_MAX))
    return provider
