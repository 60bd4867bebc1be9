"""Grades a deployment on the server's own machine: ``holdfast doctor``.

Each check looks at one thing and says what to change. Nothing is changed, and nothing
is asked of the server but its status.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from ipaddress import ip_network
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.access.secrets import FIRST_KEY_LABEL, KEYS_FILE, SECRETS_FILE, read_keys
from holdfast.bounds import size_text
from holdfast.drivers.files import others_can_write
from holdfast.drivers.sqlite.backup import MANIFEST
from holdfast.errors import HoldfastError
from holdfast.node.backup import FOLDER
from holdfast.node.state_dir import holder
from holdfast.settings import LOOPBACK, Settings

DISK_LOOK, DISK_BAD = 0.1, 0.05
"""What must be left of the disk; as the alert HoldfastDiskFull has it."""
FSYNC_LOOK_SECONDS, FSYNC_BAD_SECONDS = 0.005, 0.05
"""A group of sends waits for one; the second is a tenth of the objective of a send."""
FSYNC_NONE_SECONDS = 0.00002
"""Faster than any medium: it does not reach one."""
FSYNC_TIMES = 25
FILES_BESIDE = 500
"""Open files of a server besides its connections."""
FILES_BAD = 1024
TOKEN_LOOK_DAYS, TOKEN_BAD_DAYS = 30, 365
BACKUP_LOOK_HOURS, BACKUP_BAD_DAYS = 26, 8
CLOCK_UNSYNCHRONISED = 5
"""What adjtimex returns then."""
NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"}


class Grade(IntEnum):
    """The value is the exit code of the worst."""

    good = 0
    look = 10
    bad = 20


class Finding(NamedTuple):
    """``what``: as it is. ``advice``: what to change; empty if nothing."""

    check: str
    grade: Grade
    what: str
    advice: str = ""


class Deployment(NamedTuple):
    """What is graded. ``status``: of the running server; None: it does not serve.
    ``trouble``: why there is none, or nothing in it but the readiness. ``sinks``: where
    the running server reports alerts, and how that went; None: it does not say.
    """

    settings: Settings
    state: Path
    status: Mapping[str, Any] | None
    now: float
    trouble: str = ""
    sinks: Sequence[Mapping[str, str]] | None = None


def grade(deployment: Deployment) -> list[Finding]:
    """Every check; one that cannot look says so."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found += check(deployment)
        except (OSError, HoldfastError) as error:
            name = check.__name__.removeprefix("_").replace("_", " ")
            found.append(Finding(name, Grade.look, f"could not be looked at: {error}"))
    return found


def _above(value: float, look: float, bad: float) -> Grade:
    return Grade.bad if value > bad else Grade.look if value > look else Grade.good


def _server(it: Deployment) -> Iterator[Finding]:
    if it.status is None:
        what = it.trouble or "does not answer"
        yield Finding("server", Grade.bad, what, "start it, or name it with --url")
        return
    if it.trouble:
        what = f"is ready; its alerts cannot be seen: {it.trouble}"
        yield Finding("server", Grade.look, what, "give an admin key with --token-file")
        return
    firing = [f"{each['severity']} {each['name']}" for each in it.status.get("alerts", ())]
    if firing:
        worst = any(not each.startswith("warning") for each in firing)
        what = f"alerts fire: {', '.join(firing)}"
        yield Finding("server", Grade.bad if worst else Grade.look, what, "`holdfast status`")
    elif it.status.get("ready") is False:
        yield Finding("server", Grade.bad, "is not ready", "`holdfast status` says why")
    else:
        yield Finding("server", Grade.good, "is ready, and no alert fires")


def _state_directory(it: Deployment) -> Iterator[Finding]:
    if not it.state.is_dir():
        yield Finding(
            "state directory", Grade.bad, f"{it.state} is not there",
            "name it with --state-dir, or start the server once",
        )  # fmt: skip
        return
    if others_can_write(it.state):
        yield Finding(
            "state directory", Grade.bad, f"others can write to {it.state}",
            f"chmod go-w {it.state}",
        )  # fmt: skip
    else:
        yield Finding("state directory", Grade.good, f"{it.state}, private to its user")
    kind = _file_system(it.state)
    if kind in NETWORK_FILE_SYSTEMS:
        yield Finding("state directory", Grade.bad, f"is on {kind}", "use a local disk")


def _file_system(path: Path) -> str:
    """The type of the file system that holds a path; empty if nobody says."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    at = str(path.resolve())
    holding = [
        (mount, kind) for mount, kind in mounts if (at + "/").startswith(mount.rstrip("/") + "/")
    ]
    return max(holding, key=lambda each: len(each[0]), default=["", ""])[1]


def _disk(it: Deployment) -> Iterator[Finding]:
    found = os.statvfs(it.state)
    size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    used = 1 - free / size if size else 0.0
    grade = _above(used, 1 - DISK_LOOK, 1 - DISK_BAD)
    advice = "make room, or move the state directory" if grade else ""
    yield Finding("disk", grade, f"{size_text(free)} of {size_text(size)} are free", advice)


def _fsync(it: Deployment) -> Iterator[Finding]:
    """On the disk of the state directory, with as much as a small group writes."""
    spent = []
    with tempfile.TemporaryFile(dir=it.state) as file:
        for _ in range(FSYNC_TIMES):
            file.write(b"x" * 4096)
            file.flush()
            started = time.perf_counter()
            os.fsync(file.fileno())
            spent.append(time.perf_counter() - started)
    median = statistics.median(spent)
    what = f"takes {median * 1000:.2f} ms"
    if median < FSYNC_NONE_SECONDS:
        yield Finding(
            "fsync", Grade.bad, f"{what}: it reaches no disk",
            "a power cut would lose acknowledged messages: use a disk that syncs",
        )  # fmt: skip
    elif median > FSYNC_LOOK_SECONDS:
        grade = Grade.bad if median > FSYNC_BAD_SECONDS else Grade.look
        yield Finding("fsync", grade, what, "every send waits for one: use a faster disk")
    else:
        yield Finding("fsync", Grade.good, what)


def _open_files(it: Deployment) -> Iterator[Finding]:
    limit, whose = resource.getrlimit(resource.RLIMIT_NOFILE)[1], "here"
    if (pid := holder(it.state)) is not None:
        text = Path(f"/proc/{pid}/limits").read_text()
        match = re.search(r"^Max open files +\S+ +(\d+|unlimited)", text, re.MULTILINE)
        if match:
            limit = resource.RLIM_INFINITY if match[1] == "unlimited" else int(match[1])
            whose = "of the server"
    wanted = it.settings.access.connections.connections_max + FILES_BESIDE
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        yield Finding("open files", Grade.good, f"the limit {whose} is {limit:,}")
        return
    grade = Grade.bad if limit <= FILES_BAD else Grade.look
    yield Finding(
        "open files", grade,
        f"the limit {whose} is {limit:,}, and access.connections.connections_max"
        f" {wanted - FILES_BESIDE:,}",
        f"LimitNOFILE={wanted} in its unit, or fewer connections",
    )  # fmt: skip


def _clock(it: Deployment) -> Iterator[Finding]:
    """Whether the kernel thinks that its clock is synchronised."""
    buffer = ctypes.create_string_buffer(512)  # more than struct timex; modes 0: only read
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    if state == CLOCK_UNSYNCHRONISED:
        yield Finding(
            "clock", Grade.look, "is not synchronised",
            "run an NTP client: tokens end and messages are stamped by it",
        )  # fmt: skip
    elif state < 0:
        yield Finding("clock", Grade.look, "nobody says whether it is synchronised")
    else:
        yield Finding("clock", Grade.good, "is synchronised")


def _proxy(it: Deployment) -> Iterator[Finding]:
    server = it.settings.server
    wide = [each for each in server.trusted_proxies if ip_network(each).num_addresses > 2**16]
    if wide:
        yield Finding(
            "proxy", Grade.bad, f"server.trusted_proxies has {wide[0]}: anybody there can claim"
            " any address", "name the proxy's own address",
        )  # fmt: skip
    elif server.trusted_proxies:
        yield Finding("proxy", Grade.good, f"{', '.join(server.trusted_proxies)} is declared")
    elif server.allowed_origins:
        yield Finding(
            "proxy", Grade.look, "pages of other origins may connect, and no proxy is declared",
            "name it in server.trusted_proxies: else all clients count as one address",
        )  # fmt: skip
    else:
        yield Finding("proxy", Grade.good, "none; only this machine can connect")


def _tls(it: Deployment) -> Iterator[Finding]:
    plain = [
        origin
        for origin in it.settings.server.allowed_origins
        if origin.startswith("http://") and origin.split("/")[2].split(":")[0] not in LOOPBACK
    ]
    if plain:
        yield Finding(
            "TLS", Grade.bad, f"server.allowed_origins has {plain[0]}",
            "serve the page over https: tokens and messages would pass in the clear",
        )  # fmt: skip
        return
    yield Finding("TLS", Grade.good, "no page is allowed without it")


def _tokens(it: Deployment) -> Iterator[Finding]:
    days = it.settings.access.tokens.ttl_seconds_max / 86400
    grade = (
        Grade.bad if days > TOKEN_BAD_DAYS else Grade.look if days > TOKEN_LOOK_DAYS else Grade.good
    )
    advice = (
        "" if grade is Grade.good else "lower access.tokens.ttl_seconds_max: a stolen one lasts"
    )
    yield Finding("tokens", grade, f"live for at most {days:g} days", advice)


def _keys(it: Deployment) -> Iterator[Finding]:
    if it.settings.cluster.postgres or it.settings.access.credentials_dir:
        yield Finding("keys", Grade.good, "are not in the state directory")
        return
    for name in (SECRETS_FILE, KEYS_FILE):
        if (file := it.state / name).exists() and file.stat().st_mode & 0o077:
            yield Finding("keys", Grade.bad, f"others can read {file}", f"chmod 600 {file}")
    admins = [key for key in read_keys(it.state / KEYS_FILE) if key.kind == "admin"]
    if all(key.label == FIRST_KEY_LABEL for key in admins):
        yield Finding(
            "keys", Grade.look, "only the first admin key exists: the audit log cannot tell"
            " operators apart", "`holdfast key create admin --label NAME` for each",
        )  # fmt: skip
    else:
        yield Finding("keys", Grade.good, f"{len(admins)} admin keys")


def _backups(it: Deployment) -> Iterator[Finding]:
    if it.settings.cluster.postgres:
        yield Finding(
            "backups", Grade.look, "are PostgreSQL's, which nobody here can see",
            "make sure that they are taken, and try a restore",
        )  # fmt: skip
        return
    taken = [
        file.stat().st_mtime
        for file in (it.state / FOLDER).glob(f"*/{MANIFEST}")
        if not file.parent.name.endswith(".partial")
    ]
    if not taken:
        yield Finding(
            "backups", Grade.bad, "there is none", "`holdfast backup --reason …`, every day"
        )
        return
    hours = (it.now - max(taken)) / 3600
    grade = _above(hours, BACKUP_LOOK_HOURS, BACKUP_BAD_DAYS * 24)
    advice = "`holdfast backup --reason …`, every day" if grade else ""
    yield Finding("backups", grade, f"the newest is {hours:.0f} h old", advice)


def _engines(it: Deployment) -> Iterator[Finding]:
    settings = it.settings
    if settings.durability.sqlite.synchronous != "FULL":
        yield Finding(
            "engines", Grade.bad, "durability.sqlite.synchronous is NORMAL",
            "take the setting out: a power cut would lose acknowledged messages",
        )  # fmt: skip
    elif settings.work.webhooks.private_allowed:
        yield Finding(
            "engines", Grade.bad, "work.webhooks.private_allowed is true",
            "take it out: tenants' webhooks could reach your own network",
        )  # fmt: skip
    else:
        what = "SQLite with full synchronisation"
        if settings.cluster.postgres:
            what = "PostgreSQL; its settings are checked at every start"
        yield Finding("engines", Grade.good, what)


def _alerts(it: Deployment) -> Iterator[Finding]:
    """The sinks of the running server; without one, those of the settings."""
    named = [sink.title for sink in it.settings.alerts.sinks if sink.kind != "log"]
    called = [sink for sink in it.sinks or () if sink["kind"] != "log"]
    if not (named if it.sinks is None else called):
        yield Finding("alerts", Grade.look, "go to the log only", "name somebody in alerts.sinks")
    elif it.sinks is None:
        what = f"go to {', '.join(named)} by the settings; the server does not say how that goes"
        yield Finding("alerts", Grade.good, what)
    for sink in called:
        name, last = sink["name"], sink["last"]
        if sink["error"]:
            what = f"{name} did not take the last notice: {sink['error']}"
            yield Finding("alerts", Grade.bad, what, f"mend it, then `holdfast alerts test {name}`")
        elif last:
            yield Finding("alerts", Grade.good, f"{name} took the last notice, {last}")
        else:
            what = f"{name} has not taken a notice yet"
            yield Finding("alerts", Grade.look, what, f"`holdfast alerts test {name}`")


CHECKS: tuple[Callable[[Deployment], Iterator[Finding]], ...] = (
    _server,
    _state_directory,
    _disk,
    _fsync,
    _open_files,
    _clock,
    _proxy,
    _tls,
    _tokens,
    _keys,
    _backups,
    _engines,
    _alerts,
)
