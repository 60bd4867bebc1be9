"""Delivers notices of alerts: to a webhook, a command, the log.

A webhook's notice is a job, so that it survives a restart and is tried again. When the
job store is what fails, or takes no job, the notice is posted directly: the path of an
alert must not be the one that it is about. A notice that may have become a job and is
posted too has the same ``webhook-id`` both times.

Each sink has a task and a queue of its own: one that hangs delays no other, and never
the judge. A notice that cannot be delivered is counted and leaves a line with its
alerts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import telemetry
from holdfast.clock import Clock, Ids, timestamp
from holdfast.errors import BadSetting, HoldfastError, InvalidMessage
from holdfast.telemetry.notices import AlertSettings, AlertView, SinkSettings
from holdfast.webhooks.signature import sign
from holdfast.work.contract import WorkStore
from holdfast.work.failures import JobFailed
from holdfast.work.handlers import Context, Handlers
from holdfast.work.job import JobDraft, Policies, Reason

if TYPE_CHECKING:
    from holdfast.webhooks.http_client import WebhookCaller

JOB_TYPE = "alert"
QUEUED_MAX = 16
"""Notices that wait for one sink; beyond it the oldest is given up, with a line."""
ENQUEUE_SECONDS = 5.0
ANSWER_BYTES_MAX = 4096
OUTPUT_BYTES_MAX = 4096
"""Of what a command prints, for the line about its failure."""
_encode = msgspec.json.Encoder().encode


class AlertNotice(msgspec.Struct, frozen=True):
    """The payload of a job: which sink, and what it gets."""

    sink: str
    notice_id: str
    body: dict[str, Any]


class SinkStatus(msgspec.Struct, frozen=True):
    """How a sink's last notice ended. ``last``: empty before the first."""

    name: str
    kind: str
    severity: str
    last: str = ""
    error: str = ""


def with_alerts(policies: Policies) -> Policies:
    """The policies plus those of alerts: soon again, and no breaker."""
    return policies.with_type(JOB_TYPE, base_seconds=2.0, cap_seconds=300.0, feeds_breaker=False)


class UndeliveredNotice(Exception):
    """A sink did not take a notice; the text says why."""


class AlertSinks:
    """All sinks of a node. ``jobs_up``: whether the job store answers."""

    def __init__(
        self,
        settings: AlertSettings,
        jobs: WorkStore,
        jobs_up: Callable[[], bool],
        clock: Clock,
        ids: Ids,
    ) -> None:
        self._settings, self._jobs, self._jobs_up = settings, jobs, jobs_up
        self._clock, self._ids = clock, ids
        self._secrets = {sink.title: read_secret(sink) for sink in settings.chosen_sinks}
        self._sinks = {sink.title: sink for sink in settings.chosen_sinks}
        self._queues = {title: _Queue() for title in self._sinks}
        self._status = {
            title: SinkStatus(title, sink.kind, _least(sink)) for title, sink in self._sinks.items()
        }
        self._opening: asyncio.Task[WebhookCaller] | None = None

    @property
    def status(self) -> list[SinkStatus]:
        return list(self._status.values())

    def register(self, handlers: Handlers) -> None:
        """Let the worker run the jobs of webhooks."""
        deadline = 2 * self._settings.webhook_seconds + 20

        @handlers.handle(AlertNotice, type=JOB_TYPE, deadline_seconds=deadline)
        async def deliver(ctx: Context, notice: AlertNotice) -> None:
            sink = self._sinks.get(notice.sink)
            if sink is None or sink.kind != "webhook":
                telemetry.log.warning(
                    "webhooks.alert_sink_gone", sink=notice.sink, alerts=_names(notice.body)
                )
                return
            try:
                await self._post(sink, notice.notice_id, notice.body)
            except UndeliveredNotice as error:
                self._on_result(sink, notice.body, str(error))
                raise JobFailed(Reason.TRANSPORT_UNAVAILABLE, str(error)) from None
            self._on_result(sink, notice.body)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Deliver what is put while the block runs."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._close)
            for title, sink in self._sinks.items():
                task = asyncio.create_task(self._run(sink), name=f"holdfast-alerts-{title}")
                stack.push_async_callback(_cancelled, task)
            yield

    def put(self, sink: SinkSettings, alerts: Sequence[AlertView], body: dict[str, Any]) -> None:
        """Deliver a notice soon. The log has it at once."""
        if sink.kind == "log":
            for alert in alerts:
                _write(alert)
            self._on_result(sink, body)
            return
        dropped = self._queues[sink.title].put(body)
        if dropped is not None:
            self._on_result(sink, dropped, f"more than {QUEUED_MAX} notices wait for it")

    async def test(self, sink: SinkSettings, body: dict[str, Any]) -> str:
        """Deliver a notice now, past the queue and the jobs; returns why it failed, or
        nothing.
        """
        try:
            await self._deliver(sink, body, direct=True)
        except UndeliveredNotice as error:
            self._on_result(sink, body, str(error))
            return str(error)
        self._on_result(sink, body)
        return ""

    async def _run(self, sink: SinkSettings) -> None:
        while True:
            body = await self._queues[sink.title].get()
            try:
                if await self._deliver(sink, body):
                    self._on_result(sink, body)
            except UndeliveredNotice as error:
                self._on_result(sink, body, str(error))
            except Exception as error:
                telemetry.defect("alerts", error)
                self._on_result(sink, body, f"{type(error).__name__}: {error}")

    async def _deliver(
        self, sink: SinkSettings, body: dict[str, Any], *, direct: bool = False
    ) -> bool:
        """Whether it is delivered already; a job will report that itself."""
        if sink.kind == "command":
            await run_command(sink.argv, _encode(body), self._settings.command_seconds)
            return True
        notice_id = self._ids.new("alert_")
        if not direct and self._jobs_up() and await self._enqueue(sink, notice_id, body):
            return False
        await self._post(sink, notice_id, body)
        return True

    async def _enqueue(self, sink: SinkSettings, notice_id: str, body: dict[str, Any]) -> bool:
        payload = _encode(AlertNotice(sink.title, notice_id, body))
        try:
            async with asyncio.timeout(ENQUEUE_SECONDS):
                await self._jobs.enqueue([JobDraft(JOB_TYPE, payload, None, sink.title)])
        except (HoldfastError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            telemetry.log.warning("webhooks.alert_sent_directly", sink=sink.title, error=why)
            return False
        return True

    async def _post(self, sink: SinkSettings, notice_id: str, body: dict[str, Any]) -> None:
        data = _encode(body)
        headers = {"content-type": "application/json", "webhook-id": notice_id}
        if secret := self._secrets[sink.title]:
            headers = sign(secret, notice_id, self._clock.now(), data)
        headers["user-agent"] = "Holdfast-Alerts/1"
        caller = await self._caller()
        try:
            status, text, _ = await caller.post(sink.url, data, headers, ANSWER_BYTES_MAX)
        except OSError as error:
            raise UndeliveredNotice(str(error)[:300]) from None
        if not 200 <= status < 300:
            shown = text[:200].decode("utf-8", "replace")
            where = " (redirects are not followed)" if 300 <= status < 400 else ""
            raise UndeliveredNotice(f"it answered {status}{where}: {shown}".rstrip(": "))

    async def _caller(self) -> WebhookCaller:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> WebhookCaller:
        module = await asyncio.to_thread(import_module, "holdfast.webhooks.http_client")
        seconds = self._settings.webhook_seconds
        caller: WebhookCaller = module.WebhookCaller(
            timeout_seconds=seconds, connect_timeout_seconds=seconds, private_allowed=True
        )
        return caller

    async def _close(self) -> None:
        if self._opening is not None:
            await (await self._opening).close()

    def _on_result(self, sink: SinkSettings, body: dict[str, Any], error: str = "") -> None:
        telemetry.alert_notice(sink.kind, failed=bool(error))
        at = timestamp(self._clock.now())
        self._status[sink.title] = msgspec.structs.replace(
            self._status[sink.title], last=at, error=error
        )
        if error:
            telemetry.log.error(
                "webhooks.alert_undelivered", sink=sink.title, error=error, alerts=_names(body)
            )


def _least(sink: SinkSettings) -> str:
    return "warning" if sink.kind == "log" else sink.severity


def _names(body: dict[str, Any]) -> str:
    alerts = body.get("alerts", ())
    return ", ".join(f"{each['labels']['alertname']} {each['status']}" for each in alerts)


def _write(alert: AlertView) -> None:
    log = {"SEV-1": telemetry.log.critical, "SEV-2": telemetry.log.error}.get(
        alert.severity, telemetry.log.warning
    )
    if alert.state == "resolved":
        log = telemetry.log.info
    log(
        f"node.alert_{'resolved' if alert.state == 'resolved' else 'fired'}",
        alert=alert.name,
        severity=alert.severity,
        detail=alert.means,
        runbook=alert.runbook,
        since=alert.since,
        **alert.labels,
    )


def read_secret(sink: SinkSettings) -> str:
    """The secret of a webhook, or nothing. BadSetting if its file is of no use."""
    if not sink.secret_file:
        return ""
    path = Path(sink.secret_file).expanduser()
    try:
        secret = path.read_text().strip()
        if path.stat().st_mode & 0o007:
            raise BadSetting(f"alerts.sinks: {path} can be read by everybody: `chmod o=` it")
        sign(secret, "check", 0, b"")
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"alerts.sinks: {path} cannot be read: {error}") from None
    except InvalidMessage:
        secret = ""
    if len(secret) < 32:
        raise BadSetting(
            f"alerts.sinks: {path} must hold a secret of at least 24 bytes in base64, as in"
            " `echo whsec_$(openssl rand -base64 32)`"
        )
    return secret


class _Queue:
    """The notices that wait for one sink."""

    def __init__(self) -> None:
        self._waiting = deque[dict[str, Any]]()
        self._put = asyncio.Event()

    def put(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Returns what had to be given up for it."""
        dropped = self._waiting.popleft() if len(self._waiting) >= QUEUED_MAX else None
        self._waiting.append(body)
        self._put.set()
        return dropped

    async def get(self) -> dict[str, Any]:
        while not self._waiting:
            self._put.clear()
            await self._put.wait()
        return self._waiting.popleft()


async def run_command(argv: Sequence[str], data: bytes, seconds: float) -> None:
    """Run a program with this on its stdin, within the time; UndeliveredNotice if
    it does not end well. It is a process group of its own, so that what it started ends
    with it.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=OUTPUT_BYTES_MAX,
        )
    except (OSError, ValueError) as error:
        raise UndeliveredNotice(f"{argv[0]} cannot be started: {error}") from None
    assert process.stdin is not None and process.stderr is not None
    printed = b""
    try:
        async with asyncio.timeout(seconds):
            with contextlib.suppress(ConnectionError):  # it need not read
                process.stdin.write(data)
                await process.stdin.drain()
                process.stdin.close()
            while piece := await process.stderr.read(OUTPUT_BYTES_MAX):
                printed = (printed + piece)[:OUTPUT_BYTES_MAX]
            await process.wait()
    except TimeoutError:
        raise UndeliveredNotice(f"{argv[0]} ran longer than {seconds:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode:
        shown = printed[:200].decode("utf-8", "replace").strip()
        raise UndeliveredNotice(f"{argv[0]} ended with {process.returncode}: {shown}".rstrip(": "))


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
