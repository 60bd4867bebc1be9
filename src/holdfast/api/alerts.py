"""Operators' endpoints of alerts: which fire, silences, tests of sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from holdfast.api.admin import record
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call
from holdfast.api.schemas import RequestBody, Why, _Reason
from holdfast.telemetry.notices import AlertView, Silence
from holdfast.telemetry.objectives import MeasuredObjective
from holdfast.webhooks.alert_sinks import SinkStatus

SILENCE_SECONDS_MAX = 30 * 86400
TEST_SECONDS_MAX = 90.0
"""A sink may take as long as the settings allow."""


_Name = Annotated[str, Meta(min_length=1, max_length=100)]


class SilenceAlert(RequestBody, frozen=True):
    """``seconds``: how long."""

    alert: _Name
    seconds: Annotated[float, Meta(gt=0, le=SILENCE_SECONDS_MAX)]
    reason: _Reason


class EndSilence(RequestBody, frozen=True):
    alert: _Name
    reason: _Reason


class ChooseSinks(Why, frozen=True):
    """Without ``sinks``: all of them."""

    sinks: Annotated[Sequence[str], Meta(max_length=100)] = ()


class AlertList(Struct, frozen=True):
    """Alerts that are pending or firing, the worst first."""

    alerts: Sequence[AlertView]
    silences: Sequence[Silence]
    sinks: Sequence[SinkStatus]


class ObjectiveList(Struct, frozen=True):
    objectives: Sequence[MeasuredObjective]


class SinkTests(Struct, frozen=True):
    """For each sink why it failed; empty if it took the test."""

    results: Mapping[str, str]


async def list_alerts(deps: ApiDeps, call: Call) -> Answer:
    alerts = deps.alerts
    return Answer(AlertList(alerts.alerts, alerts.silences, alerts.sinks))


async def list_objectives(deps: ApiDeps, call: Call) -> Answer:
    return Answer(ObjectiveList(deps.alerts.objectives()))


async def silence_alert(deps: ApiDeps, call: Call) -> Answer:
    body: SilenceAlert = call.body

    async def recorded() -> None:
        details = f"{body.seconds:g} s"
        await record(deps, call, "alert.silence", body.alert, body.reason, details=details)

    by = call.principal.user_id
    return Answer(await deps.alerts.silence(body.alert, body.seconds, body.reason, by, recorded))


async def end_silence(deps: ApiDeps, call: Call) -> Answer:
    body: EndSilence = call.body

    async def recorded() -> None:
        await record(deps, call, "alert.unsilence", body.alert, body.reason)

    return Answer(await deps.alerts.end_silence(body.alert, recorded))


async def check_sinks(deps: ApiDeps, call: Call) -> Answer:
    body: ChooseSinks = call.body
    await record(deps, call, "alert.test", ", ".join(body.sinks) or "all", body.reason)
    return Answer(SinkTests(await call.done_in_time(deps.alerts.test(body.sinks))))
