"""Starts a node, serves until a signal, and drains it."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

import uvloop

from holdfast import telemetry
from holdfast.api.address_limits import AddressLimits
from holdfast.api.app import RestApp
from holdfast.clock import Clock, Ids, SystemClock
from holdfast.errors import InternalError
from holdfast.gateway.transport.http import HTTP_TIMES, HttpTimes
from holdfast.gateway.transport.server import bound, serving
from holdfast.limits.composition import open_limits
from holdfast.limits.entry_rules import DEFAULT_RULES
from holdfast.limits.snapshot_file import identity
from holdfast.node.alerts import AlertDeps, NodeAlerts
from holdfast.node.backup import Backups, require_no_chats, require_whole
from holdfast.node.banner import banner_lines
from holdfast.node.engines import Engines, open_engines
from holdfast.node.huge_pages import use_huge_pages
from holdfast.node.node import Node
from holdfast.node.state_dir import held
from holdfast.node.supervisor import GAUGES_SECONDS, background_task
from holdfast.node.work import NodeWork
from holdfast.settings import Settings, differences
from holdfast.webhooks.alert_sinks import AlertSinks

STOPS = (signal.SIGINT, signal.SIGTERM)
NEW_OBJECTS_MAX = 10_000
"""A collection over this many objects takes about half a millisecond."""


def run_node(
    settings: Settings,
    announce: Callable[[str], None] = print,
    gauges_seconds: float = GAUGES_SECONDS,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain. Raises an OperatorError if it cannot
    start.

    Until it serves, a signal ends the process at once: opening a large file takes long.
    """
    telemetry.configure_logging(settings.server.log_format == "json", settings.server.log_level)
    before = {number: signal.signal(number, _end_the_start) for number in STOPS}
    try:
        uvloop.run(_serve(settings, announce, open_files_max(), gauges_seconds))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_files_max() -> int:
    """Raise the limit of open files, usually 1,024, to the hard limit; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def settle_heap() -> None:
    """Tune the memory of the process; call it once everything is built.

    Objects that exist now live until the process ends, so they are frozen: a full
    collection over all modules takes tens of milliseconds, during which no ack leaves.
    The young threshold is raised, because a group of sends makes many times the default
    700 objects and frees them all. The remains of a closed connection are in the oldest
    generation, so that is collected more often than by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS_MAX, 2, 2)
    use_huge_pages()


def _end_the_start(number: int, frame: FrameType | None) -> None:
    """Exit at once: no request was accepted yet, and the files survive any kill."""
    os.write(sys.stderr.fileno(), b"Stopped before it had started.\n")
    os._exit(128 + number)


async def _serve(
    settings: Settings, announce: Callable[[str], None], files_max: int, gauges_seconds: float
) -> None:
    stop = asyncio.Event()

    def may_be_stopped() -> None:
        for number in STOPS:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async with running(settings, may_be_stopped, gauges_seconds=gauges_seconds) as node:
        settle_heap()
        for line in banner_lines(node.settings, files_max):
            announce(line)
        waits = [asyncio.create_task(event.wait()) for event in (stop, node.broken)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        announce("Stopping: answering open requests, closing connections.")
    if node.broken.is_set():
        raise InternalError(
            "a part of the server ended by a defect, which is in its log; start it again"
        )


@asynccontextmanager
async def _alerts(
    node: Node, sinks: AlertSinks, state: Path, clock: Clock, pause_seconds: float
) -> AsyncIterator[NodeAlerts]:
    """The node's alerts, judged while the block runs."""
    shared = node.engines.silences
    deps = AlertDeps(node.node_id, node.url, state, sinks, clock, shared)
    alerts = NodeAlerts(node.settings.alerts, deps, pause_seconds=pause_seconds)
    following = nullcontext() if shared is None else background_task("silences", alerts.follow)
    async with sinks.running(), following, background_task("alerts", alerts.run):
        yield alerts
    await alerts.save()


def _work(settings: Settings, node_id: str, engines: Engines, clock: Clock) -> NodeWork:
    return NodeWork(
        settings.work,
        node_id,
        engines.jobs,
        engines.endpoints,
        engines.log,
        engines.chats,
        clock,
        settings.streaming.assistants,
        settings.server.roles,
    )


def _at_port(settings: Settings, port: int) -> Settings:
    """The settings with the port that was found, if any was to be."""
    return replace(settings, server=replace(settings.server, port=port))


@asynccontextmanager
async def running(
    settings: Settings,
    about_to_serve: Callable[[], None] = lambda: None,
    http_times: HttpTimes = HTTP_TIMES,
    gauges_seconds: float = GAUGES_SECONDS,
    alert_clock: Clock | None = None,
) -> AsyncIterator[Node]:
    """A node that serves while the block runs; leaving the block drains it.

    ``about_to_serve`` is called before the first request is answered; ``alert_clock``
    is what the windows of alerts are measured by.
    """
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(bound(settings.server.host, settings.server.port))
        settings = _at_port(settings, listening.getsockname()[1])
        state = stack.enter_context(held(settings.server.state_path))
        (require_no_chats if settings.cluster.postgres else require_whole)(state)
        node_id = settings.server.node_id or identity(state, Ids(clock))
        stack.enter_context(telemetry.tracing(settings.traces, node_id))
        telemetry.settings_changed(path for path, _, _ in differences(settings))
        sinks = AlertSinks(settings.alerts, clock)
        engines = await stack.enter_async_context(open_engines(settings, state, clock))
        limits = await stack.enter_async_context(
            open_limits(settings.limits, state, node_id, DEFAULT_RULES, clock)
        )
        work = _work(settings, node_id, engines, clock)
        loaded = await engines.credentials.load()
        node = Node(settings, engines, limits, work.parts, loaded, clock, gauges_seconds)
        await node.revocations.refresh()
        await stack.enter_async_context(node.background_tasks())
        await stack.enter_async_context(node.streaming.running())
        alert_time = alert_clock or clock
        alerts = await stack.enter_async_context(
            _alerts(node, sinks, state, alert_time, gauges_seconds)
        )
        await stack.enter_async_context(
            work.running(node.assistant_deps(), engines.leases, engines.shared_log)
        )
        await stack.enter_async_context(node.gateway)
        backups = Backups(state, clock, Ids(clock))
        address_limits = AddressLimits(settings.api, clock, settings.server.proxies)
        app = RestApp(node.api_deps(backups, alerts), address_limits)
        about_to_serve()
        stop_accepting = await stack.enter_async_context(
            serving(app, node.http_deps(address_limits, http_times), listening, node.broken)
        )
        try:
            yield node
        finally:
            backups.stop()
            # Open connections are still answered: new handshakes and streams are
            # refused, and readiness says so.
            stop_accepting()
            await asyncio.gather(node.gateway.drain(), node.streaming.parts.drain(), app.drain())
