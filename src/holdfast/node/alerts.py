"""Judges the alerts over this node's own metrics, and reports them to the sinks.

For whoever has no Prometheus; the same alerts are in ``deploy/prometheus/rules.yml``.
Silences and what was reported are kept in ``alerts.json``, so that a restart neither
ends a silence nor leaves a sink with an alert that never ends.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from holdfast import telemetry
from holdfast.clock import Clock, timestamp
from holdfast.drivers.files import replace_file
from holdfast.errors import InvalidMessage
from holdfast.telemetry import ALERTS
from holdfast.telemetry.alert import Severity
from holdfast.telemetry.causes import causes_first
from holdfast.telemetry.expressions import Absent
from holdfast.telemetry.judge import AlertInstance, Judge, Samples
from holdfast.telemetry.notices import (
    AlertSettings,
    AlertView,
    Notices,
    Silence,
    SinkSettings,
    notice_body,
    worst_of_each,
)
from holdfast.telemetry.objectives import MeasuredObjective, ObjectiveMeter
from holdfast.webhooks.alert_sinks import AlertSinks, SinkStatus

JUDGE_SECONDS = 5.0
"""How often alerts are judged: 1.4 ms of processor time each time, 0.3 ms a second."""
SETTLED_SECONDS = 660.0
"""After this time an alert that fired before a restart would fire again: 5 minutes of
window, 5 minutes to hold, and a minute.
"""
STARTED_SECONDS = 60.0
"""So long after the start a metric that is absent is not shown as pending: parts report
one after another.
"""
FILE = "alerts.json"
TEST = "HoldfastTest"
_Record = Callable[[], Awaitable[None]]
"""Writes to the audit log."""
_NAMES = {alert.name for alert in ALERTS}


class _Kept(Struct, frozen=True):
    """What is in the file."""

    silences: Sequence[Silence] = ()
    reported: Mapping[str, Sequence[AlertView]] = {}


class NodeAlerts:
    """The alerts of one node. ``run`` must be running, and the sinks too."""

    def __init__(
        self,
        settings: AlertSettings,
        node_id: str,
        url: str,
        state: Path,
        sinks: AlertSinks,
        clock: Clock,
        samples: Callable[[Collection[str]], Samples] = telemetry.samples,
    ) -> None:
        self._settings, self._node_id, self._url = settings, node_id, url
        self._file, self._sinks, self._clock = state / FILE, sinks, clock
        self._samples = samples
        self._judge = Judge(ALERTS)
        self._began = clock.monotonic()
        self._meter = ObjectiveMeter(self._began)
        self._kept = _read(self._file)
        self._silences = {each.alert: each for each in self._kept.silences}
        settled_at = self._began + SETTLED_SECONDS
        self._notices = {
            sink.title: (
                sink,
                Notices(sink, settings, self._kept.reported.get(sink.title, ()), settled_at),
            )
            for sink in settings.chosen_sinks
        }

    async def run(self, pause_seconds: float = JUDGE_SECONDS) -> None:
        while True:
            self.judge()
            await self._save()
            await asyncio.sleep(pause_seconds)

    def judge(self) -> None:
        """Judge the metrics as they are now, and hand what is due to the sinks."""
        now = self._clock.monotonic()
        self._judge.judge(self._samples(self._judge.names), now)
        if self._meter.is_due(now):
            self._meter.measure(self._samples(self._meter.names), now)
        firing = [alert for alert in self.alerts if alert.state == "firing"]
        counts = Counter(alert.severity for alert in firing)
        telemetry.alerts_firing({str(each): counts[each] for each in Severity})
        silenced = {silence.alert for silence in self.silences}
        for sink, notices in self._notices.values():
            if due := notices.next(firing, silenced, now):
                self._sinks.put(sink, due, self._body(sink, due))

    @property
    def alerts(self) -> list[AlertView]:
        """Those that are pending or firing, the worst first, but causes before what
        follows from them.
        """
        until = {silence.alert: silence.until for silence in self.silences}
        found = [
            self._view(each, until.get(each.rule.alert.name, ""))
            for each in self._judge.alerts
            if not self._is_starting(each)
        ]
        return causes_first(worst_of_each(found))

    def _is_starting(self, each: AlertInstance) -> bool:
        """Whether it says only that the node has just started."""
        is_absence = isinstance(each.rule.condition.value, Absent) and each.state == "pending"
        return is_absence and self._clock.monotonic() < self._began + STARTED_SECONDS

    def objectives(self) -> Sequence[MeasuredObjective]:
        """Over this node's own last hour."""
        return self._meter.measure(self._samples(self._meter.names), self._clock.monotonic())

    @property
    def silences(self) -> list[Silence]:
        """Those that have not ended."""
        now = timestamp(self._clock.now())
        return [silence for silence in self._silences.values() if silence.until > now]

    @property
    def sinks(self) -> list[SinkStatus]:
        return self._sinks.status

    async def silence(
        self,
        alert: str,
        seconds: float,
        reason: str,
        by: str,
        record: Callable[[], Awaitable[None]],
    ) -> Silence:
        """Do not report an alert for a while; 0 ends a silence. ``record`` is awaited
        before it takes effect. InvalidMessage if there is no such alert.
        """
        if alert not in _NAMES:
            close = sorted(name for name in _NAMES if alert.lower() in name.lower())
            hint = f"; did you mean {', '.join(close[:3])}?" if close else ""
            raise InvalidMessage(f"there is no alert {alert}{hint}", field="alert")
        await record()
        made = Silence(alert, timestamp(self._clock.now() + seconds), reason, by)
        self._silences[alert] = made
        await self._save()
        return made

    async def test(self, names: Sequence[str]) -> Mapping[str, str]:
        """Send a test to these sinks, or to all; why each failed, or nothing."""
        if unknown := sorted(set(names) - set(self._notices)):
            known = ", ".join(self._notices) or "none"
            raise InvalidMessage(f"there is no sink {unknown[0]}; there are: {known}", field="sink")
        chosen = [sink for sink, _ in self._notices.values() if not names or sink.title in names]
        found = await asyncio.gather(*(self._test(sink) for sink in chosen))
        return {sink.title: error for sink, error in zip(chosen, found, strict=True)}

    async def _test(self, sink: SinkSettings) -> str:
        at = timestamp(self._clock.now())
        means, page = "A test: nothing is wrong.", "docs/guides/operating.md"
        alert = AlertView(TEST, "SEV-3", "firing", {}, at, None, means, page)
        body = self._body(sink, [alert])
        if sink.kind == "log":
            self._sinks.put(sink, [alert], body)
            return ""
        return await self._sinks.test(sink, body)

    def _body(self, sink: SinkSettings, alerts: Sequence[AlertView]) -> dict[str, Any]:
        at = timestamp(self._clock.now())
        return notice_body(alerts, sink.title, self._node_id, self._url, at)

    def _view(self, each: AlertInstance, silenced_until: str) -> AlertView:
        ago = self._clock.monotonic() - each.since
        return AlertView(
            each.rule.alert.name,
            str(each.rule.severity),
            each.state,
            dict(each.labels),
            timestamp(self._clock.now() - ago),
            round(each.value, 6) if math.isfinite(each.value) else None,
            each.rule.alert.means,
            f"docs/guides/{each.rule.alert.runbook}",
            silenced_until,
        )

    async def _save(self) -> None:
        """Keep what changed. A disk that fails is reported by others than this."""
        reported = {title: notices.reported for title, (_, notices) in self._notices.items()}
        kept = _Kept(self.silences, {title: each for title, each in reported.items() if each})
        if _same(kept, self._kept):
            return
        try:
            await asyncio.to_thread(replace_file, self._file, msgspec.json.encode(kept))
        except OSError as error:
            telemetry.log.warning("node.alerts_unwritten", file=str(self._file), error=str(error))
        self._kept = kept


def _same(one: _Kept, other: _Kept) -> bool:
    """Whether the same alerts were reported and are silenced; values do not count."""

    def facts(kept: _Kept) -> object:
        names = {
            title: sorted((each.key, each.severity) for each in alerts)
            for title, alerts in kept.reported.items()
        }
        return list(kept.silences), names

    return facts(one) == facts(other)


def _read(file: Path) -> _Kept:
    """What the last process kept; nothing if that cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return _Kept()
    except (OSError, msgspec.MsgspecError) as error:
        telemetry.log.warning("node.alerts_unreadable", file=str(file), error=str(error))
        return _Kept()
