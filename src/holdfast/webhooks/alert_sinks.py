"""Delivers notices of alerts: to a webhook, a command, the log.

A notice is not a job: the path of an alert must not be one that it may be about, and a
second path beside it would deliver out of order. What a sink has taken, and what it is
owed, survives a restart with the node's alerts (``telemetry.notices``); there it is
also decided when a sink is tried again.

Each delivery is a bounded task of its own: a sink that hangs delays no other, and never
the judge. A notice that is not taken is counted and leaves a line with its alerts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import BadSetting, InvalidMessage
from holdfast.telemetry.notices import AlertSettings, AlertView, SinkSettings
from holdfast.webhooks.signature import sign

if TYPE_CHECKING:
    from holdfast.webhooks.http_client import WebhookCaller

ANSWER_BYTES_MAX = 4096
OUTPUT_BYTES_MAX = 4096
"""Of what a command prints, for the line about its failure."""
_encode = msgspec.json.Encoder().encode
_OnDone = Callable[[str], None]
"""Gets why a notice was not taken; nothing if it was."""


class SinkStatus(msgspec.Struct, frozen=True):
    """How a sink does. ``last``: when it last took a notice, empty before. ``error``:
    why it did not take the last one, empty if it did. ``failures``: how many in a row
    it did not take. ``waiting``: how many alerts it has not heard of. ``next_try``:
    when it is tried again, empty if it did not fail.
    """

    name: str
    kind: str
    severity: str
    last: str = ""
    error: str = ""
    failures: int = 0
    waiting: int = 0
    next_try: str = ""


class UndeliveredNotice(Exception):
    """A sink did not take a notice; the text says why."""


class AlertSinks:
    """All sinks of a node. BadSetting if one can never work."""

    def __init__(self, settings: AlertSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        for number, sink in enumerate(settings.sinks):
            check_command(sink, f"alerts.sinks[{number}].argv")
        self._secrets = {
            sink.title: read_secret(sink, f"alerts.sinks[{number}].secret_file")
            for number, sink in enumerate(settings.chosen_sinks)
        }
        self.errors = dict.fromkeys(self._secrets, "")
        """Why each sink did not take what it was last given; empty if it did."""
        self._opening: asyncio.Task[WebhookCaller] | None = None
        self._deliveries = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving the block ends what is under way; whether it was taken is unknown."""
        try:
            yield
        finally:
            for task in self._deliveries:
                task.cancel()
            await asyncio.gather(*self._deliveries, return_exceptions=True)
            if self._opening is not None:
                await (await self._opening).close()

    def send(
        self,
        sink: SinkSettings,
        notice_id: str,
        alerts: Sequence[AlertView],
        body: dict[str, Any],
        on_done: _OnDone,
    ) -> None:
        """Deliver a notice; the one before it is done."""
        delivery = self._send(sink, notice_id, alerts, body, on_done)
        task = asyncio.create_task(delivery, name=f"holdfast-alerts-{sink.title}")
        self._deliveries.add(task)
        task.add_done_callback(self._deliveries.discard)

    async def deliver(
        self, sink: SinkSettings, notice_id: str, alerts: Sequence[AlertView], body: dict[str, Any]
    ) -> str:
        """Deliver a notice; returns why it failed, or nothing."""
        error = ""
        try:
            await self._call(sink, notice_id, alerts, body)
        except UndeliveredNotice as undelivered:
            error = str(undelivered)
        except Exception as defect:
            telemetry.defect("alerts", defect)
            error = f"{type(defect).__name__}: {defect}"
        self._on_result(sink, body, error)
        return error

    async def _send(
        self,
        sink: SinkSettings,
        notice_id: str,
        alerts: Sequence[AlertView],
        body: dict[str, Any],
        on_done: _OnDone,
    ) -> None:
        on_done(await self.deliver(sink, notice_id, alerts, body))

    async def _call(
        self, sink: SinkSettings, notice_id: str, alerts: Sequence[AlertView], body: dict[str, Any]
    ) -> None:
        match sink.kind:
            case "log":
                for alert in alerts:
                    _write(alert)
            case "command":
                await run_command(sink.argv, _encode(body), self._settings.command_seconds)
            case "webhook":
                await self._post(sink, notice_id, body)

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

    def _on_result(self, sink: SinkSettings, body: dict[str, Any], error: str) -> None:
        telemetry.alert_notice(sink.kind, failed=bool(error))
        self.errors[sink.title] = error
        if error:
            telemetry.log.error(
                "webhooks.alert_undelivered", sink=sink.title, error=error, alerts=_names(body)
            )


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


def read_secret(sink: SinkSettings, setting: str) -> str:
    """The secret of a webhook, or nothing. BadSetting if its file is of no use."""
    if not sink.secret_file:
        return ""
    path = Path(sink.secret_file).expanduser()
    try:
        secret = path.read_text().strip()
        if path.stat().st_mode & 0o007:
            raise BadSetting(f"{setting}: {path} can be read by everybody: `chmod o=` it")
        sign(secret, "check", 0, b"")
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"{setting}: {path} cannot be read: {error}") from None
    except InvalidMessage:
        secret = ""
    if len(secret) < 32:
        raise BadSetting(
            f"{setting}: {path} must hold a secret of at least 24 bytes in base64, as in"
            " `echo whsec_$(openssl rand -base64 32)`"
        )
    return secret


def check_command(sink: SinkSettings, setting: str) -> None:
    """BadSetting if the program of a command is not there or cannot be run."""
    if not sink.argv or shutil.which(sink.argv[0]) is not None:
        return
    program = sink.argv[0]
    if os.sep not in program:
        why = "is not in the PATH of the server; give its whole path"
    elif Path(program).is_dir():
        why = "is a directory, not a program"
    elif Path(program).exists():
        why = "cannot be run by the server: `chmod +x` it"
    else:
        why = "does not exist"
    raise BadSetting(f"{setting}: {program} {why}")


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
            # It need not read. For a closed pipe uvloop raises RuntimeError.
            with contextlib.suppress(ConnectionError, RuntimeError):
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
