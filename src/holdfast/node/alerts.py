"""Judges the alerts over this node's own metrics, and reports them to the sinks.

For whoever has no Prometheus; the same alerts are in ``deploy/prometheus/rules.yml``.
``alerts.json`` keeps what a restart must not forget: what fires, what each sink has
taken and is owed, and the silences. It is written before a sink is tried: whatever a
sink may have heard of, the next process knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct, structs

from holdfast import telemetry
from holdfast.clock import Clock, Ids, timestamp, wait_at_most
from holdfast.drivers.files import replace_file
from holdfast.errors import HoldfastError, InvalidMessage, NotFound
from holdfast.telemetry import ALERTS
from holdfast.telemetry.alert import Severity
from holdfast.telemetry.causes import causes_first
from holdfast.telemetry.expressions import Absent
from holdfast.telemetry.incidents import Incidents
from holdfast.telemetry.judge import AlertInstance, Judge, Samples
from holdfast.telemetry.notices import (
    RETRY_SECONDS,
    AlertSettings,
    AlertView,
    Notice,
    Notices,
    Silence,
    SinkMemory,
    SinkSettings,
    notice_body,
    notice_id,
    worst_of_each,
)
from holdfast.telemetry.objectives import MeasuredObjective, ObjectiveMeter
from holdfast.webhooks.alert_sinks import AlertSinks, SinkStatus
from holdfast.webhooks.silences import SharedSilences

JUDGE_SECONDS = 5.0
"""How often alerts are judged: 0.4 ms of processor time each time."""
URGENT_SECONDS = 0.1
"""The least pause between two judgements, however many urgent reasons there are."""
SETTLED_PAUSES = 6
"""After this many judgements every gauge has been set since the start."""
SAVE_SECONDS_MAX = 1.0
"""How long sinks wait for the file; a disk that hangs must not keep alerts back."""
STARTED_SECONDS = 60.0
"""So long after the start a metric that is absent is not shown as pending: parts report
one after another.
"""
FILE = "alerts.json"
TEST = "HoldfastTest"
_Record = Callable[[], Awaitable[None]]
"""Writes to the audit log."""
_NAMES = {alert.name for alert in ALERTS}
_ABSENCES = {alert.name for alert in ALERTS if isinstance(alert.when.value, Absent)}


class _Kept(Struct, frozen=True):
    """What is in the file."""

    silences: Sequence[Silence] = ()
    firing: Sequence[AlertView] = ()
    sinks: Mapping[str, SinkMemory] = {}


class _Reporting(NamedTuple):
    sink: SinkSettings
    notices: Notices


class AlertDeps(NamedTuple):
    """``state``: the state directory; ``silences``: those that nodes share."""

    node_id: str
    url: str
    state: Path
    sinks: AlertSinks
    clock: Clock
    silences: SharedSilences | None = None


class NodeAlerts:
    """The alerts of one node. ``run`` must be running, the sinks too, and ``follow`` if
    nodes share their silences.
    """

    def __init__(
        self,
        settings: AlertSettings,
        deps: AlertDeps,
        samples: Callable[[Collection[str]], Samples] = telemetry.samples,
        pause_seconds: float = JUDGE_SECONDS,
    ) -> None:
        self._node_id, self._url, self._shared = deps.node_id, deps.url, deps.silences
        self._file, self._sinks, self._clock = deps.state / FILE, deps.sinks, deps.clock
        self._ids = Ids(deps.clock)
        self._samples, self._pause_seconds = samples, pause_seconds
        self._judge = Judge(ALERTS)
        now, wall_now = deps.clock.monotonic(), deps.clock.now()
        self._began = now
        self._meter = ObjectiveMeter(now)
        self._kept = _read(self._file)
        self._writing: asyncio.Task[None] | None = None
        self._is_unwritten = False
        self._silences = {each.alert: each for each in self._kept.silences}
        self._silence_changes = 0
        settled_at = now + SETTLED_PAUSES * pause_seconds
        self._incidents = Incidents(ALERTS, self._kept.firing, now, settled_at)
        self._alerts: Sequence[AlertView] = self._kept.firing
        self._tested_at: dict[str, float] = {}
        memories = self._kept.sinks
        retry_seconds = min(RETRY_SECONDS, pause_seconds)
        self._reporting = {
            sink.title: _Reporting(
                sink,
                Notices(sink, settings, memories.get(sink.title), now, wall_now, retry_seconds),
            )
            for sink in settings.chosen_sinks
        }
        for title in memories.keys() - self._reporting.keys():
            if owed := ", ".join(each.alert.name for each in memories[title].known):
                telemetry.log.warning("node.alert_sink_gone", sink=title, alerts=owed)

    async def run(self) -> None:
        """Judge again and again; after a SEV-1 was counted without the pause."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(woken.set)

        with telemetry.on_urgent(wake):
            while True:
                woken.clear()
                await self.judge()
                urgent_seconds = min(URGENT_SECONDS, self._pause_seconds)
                await asyncio.sleep(urgent_seconds)
                await wait_at_most(woken, self._pause_seconds - urgent_seconds)

    async def follow(self) -> None:
        """Find the silences that other nodes made. While the database does not answer,
        those in force stay.
        """
        while self._shared is not None:
            changes = self._silence_changes
            with contextlib.suppress(HoldfastError):
                found = await self._shared.read()
                if changes == self._silence_changes:  # else it may be from before them
                    self._silences = {each.alert: each for each in found}
            await asyncio.sleep(self._pause_seconds)

    async def judge(self) -> None:
        """Judge the metrics as they are now, and hand what is due to the sinks."""
        now = self._clock.monotonic()
        self._judge.judge(self._samples(self._judge.names), now)
        found = self._incidents.update(map(self._view, self._judge.alerts), now)
        self._alerts = [alert for alert in found if not self._is_starting(alert)]
        if self._meter.is_due(now):
            self._meter.measure(self._samples(self._meter.names), now)
        firing = [alert for alert in self.alerts if alert.state == "firing"]
        counts = Counter(alert.severity for alert in firing)
        telemetry.alerts_firing({str(each): counts[each] for each in Severity})
        silenced = {silence.alert for silence in self.silences}
        at = timestamp(self._clock.now())
        due = [
            (each, notice)
            for each in self._reporting.values()
            if (notice := each.notices.next(firing, silenced, now, at)) is not None
        ]
        await self.save()
        for each, notice in due:
            self._send(each, notice)

    def _send(self, each: _Reporting, notice: Notice) -> None:
        body = notice_body(notice, each.sink.title, self._node_id, self._url)
        number = notice_id(body, each.notices.sent_at)
        on_done = partial(self._on_done, each.notices)
        self._sinks.send(each.sink, number, notice.alerts, body, on_done)

    def _on_done(self, notices: Notices, error: str) -> None:
        now = self._clock.monotonic()
        if error:
            notices.on_refused(now)
        else:
            notices.on_accepted(now, self._clock.now())
        self._start_writing()

    @property
    def alerts(self) -> list[AlertView]:
        """Those that are pending or firing, the worst first, but causes before what
        follows from them.
        """
        until = {silence.alert: silence.until for silence in self.silences}
        found = [
            structs.replace(alert, silenced_until=until.get(alert.name, ""))
            for alert in self._alerts
        ]
        return causes_first(worst_of_each(found))

    def _is_starting(self, alert: AlertView) -> bool:
        """Whether it says only that the node has just started."""
        is_absence = alert.name in _ABSENCES and alert.state == "pending"
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
        return [self._sink_status(*each) for each in self._reporting.values()]

    def _sink_status(self, sink: SinkSettings, notices: Notices) -> SinkStatus:
        now, pause = self._clock.now(), notices.retry_at - self._clock.monotonic()
        last = max(notices.sent_at, self._tested_at.get(sink.title, 0.0))
        return SinkStatus(
            sink.title,
            sink.kind,
            "warning" if sink.kind == "log" else sink.severity,
            timestamp(last) if last else "",
            self._sinks.errors[sink.title],
            notices.failures,
            notices.waiting,
            timestamp(now + max(0.0, pause)) if notices.failures else "",
        )

    async def silence(
        self, alert: str, seconds: float, reason: str, by: str, record: _Record
    ) -> Silence:
        """Do not report an alert for a while. ``record`` is awaited before it takes
        effect. InvalidMessage if there is no such alert.
        """
        if alert not in _NAMES:
            close = sorted(name for name in _NAMES if alert.lower() in name.lower())
            hint = f"; did you mean {', '.join(close[:3])}?" if close else ""
            raise InvalidMessage(f"there is no alert {alert}{hint}", field="alert")
        await record()
        made = Silence(alert, timestamp(self._clock.now() + seconds), reason, by)
        if self._shared is not None:
            await self._shared.put(made)
        self._silence_changes += 1
        self._silences[alert] = made
        await self.save()
        return made

    async def end_silence(self, alert: str, record: _Record) -> Silence:
        """Report an alert again; returns the silence that was. NotFound if there is
        none.
        """
        ended = next((each for each in self.silences if each.alert == alert), None)
        if ended is None:
            raise NotFound(f"{alert} is not silenced")
        await record()
        if self._shared is not None:
            await self._shared.remove(alert)
        self._silence_changes += 1
        self._silences.pop(alert, None)
        await self.save()
        return ended

    async def test(self, names: Sequence[str]) -> Mapping[str, str]:
        """Send a test to these sinks, or to all; why each failed, or nothing."""
        if unknown := sorted(set(names) - set(self._reporting)):
            known = ", ".join(self._reporting) or "none"
            raise InvalidMessage(f"there is no sink {unknown[0]}; there are: {known}", field="sink")
        chosen = [each for title, each in self._reporting.items() if not names or title in names]
        found = await asyncio.gather(*(self._test(*each) for each in chosen))
        return {each.sink.title: error for each, error in zip(chosen, found, strict=True)}

    async def _test(self, sink: SinkSettings, notices: Notices) -> str:
        at = timestamp(self._clock.now())
        means, page = "A test: nothing is wrong.", "docs/guides/operating.md"
        alert = AlertView(TEST, "SEV-3", "firing", {}, at, None, means, page)
        body = notice_body(Notice([alert]), sink.title, self._node_id, self._url)
        error = await self._sinks.deliver(sink, self._ids.new("alert_"), [alert], body)
        if not error:
            self._tested_at[sink.title] = self._clock.now()
            notices.on_tested()
        return error

    def _view(self, each: AlertInstance) -> AlertView:
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
        )

    async def save(self) -> None:
        """Write the file if something has changed; wait for it, but not long."""
        self._start_writing()
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=SAVE_SECONDS_MAX)

    def _start_writing(self) -> None:
        if self._writing is None and not _same(self._remembered(), self._kept):
            self._writing = asyncio.create_task(self._write(), name="holdfast-alerts-file")

    async def _write(self) -> None:
        """A disk that fails is reported by others than this; it is tried again with the
        next judgement.
        """
        try:
            while not _same(kept := self._remembered(), self._kept):
                await asyncio.to_thread(replace_file, self._file, msgspec.json.encode(kept))
                self._kept, self._is_unwritten = kept, False
        except OSError as error:
            if not self._is_unwritten:
                file = str(self._file)
                telemetry.log.warning("node.alerts_unwritten", file=file, error=str(error))
            self._is_unwritten = True
        finally:
            self._writing = None

    def _remembered(self) -> _Kept:
        sinks = {title: each.notices.memory for title, each in self._reporting.items()}
        return _Kept(self.silences, self._incidents.memory, sinks)


def _same(one: _Kept, other: _Kept) -> bool:
    """Whether they say the same; values of expressions do not count."""

    def facts(kept: _Kept) -> object:
        firing = [(alert.key, alert.severity) for alert in kept.firing]
        sinks = {
            title: [(e.alert.key, e.alert.severity, e.alert.state, e.accepted) for e in each.known]
            for title, each in kept.sinks.items()
        }
        sent_at = {title: each.sent_at for title, each in kept.sinks.items()}
        return list(kept.silences), firing, sinks, sent_at

    return facts(one) == facts(other)


def _read(file: Path) -> _Kept:
    """What the last process kept; nothing if that cannot be read."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=_Kept)
        known = [each for sink in kept.sinks.values() for each in sink.known]
        alerts = (*kept.firing, *(each.alert for each in known))
        for severity in (*(a.severity for a in alerts), *(e.accepted for e in known if e.accepted)):
            Severity(severity)
    except FileNotFoundError:
        return _Kept()
    except (OSError, ValueError) as error:
        telemetry.log.warning("node.alerts_unreadable", file=str(file), error=str(error))
        return _Kept()
    return kept
