"""Traces: every admin call with its outcome, nobody's name in them, and nothing at all
when they are off.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from api_rig import serving
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from holdfast import telemetry
from holdfast.clock import SystemClock
from holdfast.errors import BadSetting, HoldfastError, Unavailable
from holdfast.limits.admin import RuleAdmin
from holdfast.limits.rule_changes import Change, RuleChangeResult
from holdfast.limits.rulestore.sqlite import SqliteRuleStore
from holdfast.telemetry import TraceSettings

RULE: dict[str, Any] = {
    "tenantID": "acme",
    "resource": "/api/search",
    "algorithm": "token_bucket",
    "limit": 100,
    "window": "60s",
}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def recorded(scenario: Callable[[], Awaitable[None]], **settings: Any) -> Sequence[ReadableSpan]:
    exporter = InMemorySpanExporter()
    with telemetry.tracing(TraceSettings(**settings), "n1", exporter):
        asyncio.run(scenario())  # type: ignore[arg-type]
    return exporter.get_finished_spans()


def described(span: ReadableSpan) -> tuple[str, object, StatusCode]:
    return span.name, (span.attributes or {}).get("holdfast.outcome"), span.status.status_code


class UnavailableRules(SqliteRuleStore):
    async def change(self, change: Change) -> RuleChangeResult:
        raise Unavailable("the database of the rules cannot be changed now")


@pytest.mark.covers("004 a trace of the failed call")
def test_every_admin_call_is_a_span_with_its_outcome_and_no_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = SystemClock()
        async with SqliteRuleStore(tmp_path / "limits.db", clock) as store:
            control = RuleAdmin(store, clock, "embedded")
            await control.create(RULE, "olga")
            for body in (
                {**RULE, "expectedVersion": 9},
                {**RULE, "limit": -1, "expectedVersion": 1},
                RULE,
            ):
                with pytest.raises(HoldfastError):
                    await control.update(body, "olga")
        async with UnavailableRules(tmp_path / "limits.db", clock) as unavailable:
            with pytest.raises(Unavailable):
                await RuleAdmin(unavailable, clock, "embedded").update(
                    {**RULE, "expectedVersion": 1}, "olga"
                )

    spans = recorded(scenario)
    assert [described(span) for span in spans] == [
        ("create_rule", "ok", StatusCode.UNSET),
        ("update_rule", "version_conflict", StatusCode.UNSET),
        ("update_rule", "invalid", StatusCode.UNSET),
        ("update_rule", "invalid", StatusCode.UNSET),
        ("update_rule", "db_connection_failed", StatusCode.ERROR),
    ]
    assert all((span.end_time or 0) >= (span.start_time or 1) for span in spans), (
        "with its duration"
    )
    text = "".join(span.to_json() for span in spans)
    assert not [name for name in ("acme", "search", "olga") if name in text]
    assert '"service.instance.id": "n1"' in text


def test_admin_request_continues_its_callers_trace_and_others_are_not_traced() -> None:
    async def scenario() -> None:
        async with serving() as rest:
            key = rest.admin_key()
            rest.client.headers["traceparent"] = PARENT
            assert (await rest.ask("GET", "/admin/keys", key)).status_code == 200
            assert (await rest.ask("GET", "/admin/keys", "hf_admin_wrong")).status_code == 401
            assert (await rest.ask("GET", "/health/live", key)).status_code == 200

    spans = recorded(scenario)
    assert [(s.name, dict(s.attributes or {})) for s in spans] == [
        (
            "list_keys",
            {
                "http.request.method": "GET",
                "http.route": "/admin/keys",
                "http.response.status_code": status,
            },
        )
        for status in (200, 401)
    ]
    assert {s.context.trace_id for s in spans} == {int("0af7651916cd43dd8448eb211c80319c", 16)}
    assert {s.parent.span_id for s in spans if s.parent} == {int("b7ad6b7169203331", 16)}


def test_what_is_not_sampled_is_not_recorded() -> None:
    async def scenario() -> None:
        with telemetry.span("anything", {}):
            pass

    assert recorded(scenario, sample_ratio=0.0) == ()
    assert len(recorded(scenario)) == 1


def test_without_an_endpoint_nothing_of_opentelemetry_is_even_imported() -> None:
    program = (
        "import sys; from holdfast import telemetry\n"
        "with telemetry.tracing(telemetry.TraceSettings(), 'n1'):\n"
        "    with telemetry.span('x', {}) as span:\n"
        "        span.set_attribute('a', 1)\n"
        "assert span is telemetry.span('y', {}), 'one span for all'\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_endpoint_without_the_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with (
        pytest.raises(BadSetting, match=r"pip install '\.\[otel\]'"),
        telemetry.tracing(TraceSettings("http://127.0.0.1:4318/v1/traces"), "n1"),
    ):
        raise AssertionError("it must not start")


@pytest.mark.parametrize(
    "wrong", [{"endpoint": "collector:4317"}, {"sample_ratio": 1.5}, {"service_name": ""}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TraceSettings(**wrong)


@pytest.mark.real_time
async def test_spans_reach_a_collector() -> None:
    received: list[bytes] = []

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert head.startswith(b"POST /v1/traces ")
        received.append(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    def record(port: int) -> None:
        settings = TraceSettings(f"http://127.0.0.1:{port}/v1/traces")
        with telemetry.tracing(settings, "n1"), telemetry.span("update_rule", {}):
            pass

    server = await asyncio.start_server(collect, "127.0.0.1", 0)
    async with server:
        await asyncio.to_thread(record, server.sockets[0].getsockname()[1])
    request = ExportTraceServiceRequest()
    request.ParseFromString(received[0])
    assert request.resource_spans[0].scope_spans[0].spans[0].name == "update_rule"
