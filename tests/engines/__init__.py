"""Real servers for tests and for developers: found on this machine, else installed,
else missing with the reason.

One module per engine, each with ``start(folder) -> Server``. ``fixtures`` hands them to
pytest; ``python -m engines`` (``make dev-engines``) leaves them running for a
developer.

A server has its own data directory in a temporary folder and a free loopback port, and
is stopped by its pid; one whose run was killed is stopped by ``warden``. Nothing here
uses a server that happens to run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engines import warden

T = TypeVar("T")
START_TIMEOUT_SECONDS = 30.0
STOP_TIMEOUT_SECONDS = 20.0
POLICY = Path("/usr/sbin/policy-rc.d")
INSTALL_LOCK = Path(tempfile.gettempdir()) / "holdfast-install-engines.lock"
PORTS = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections: one of them could take a port
before its server does.
"""
PORT_PARTS = 8
PORTS_REMEMBERED = 512
KEPT_LOGS = Path(__file__).resolve().parents[2] / ".engines" / "logs"
_given: deque[int] = deque(maxlen=PORTS_REMEMBERED)


class Missing(Exception):
    """The engine is not on this machine and was not installed; the message says why."""


class Impossible(Missing):
    """It exists, but this machine does not allow its use, so no test may require it."""


@dataclass(slots=True)
class Server:
    """A started engine. ``stop`` ends the process and removes its folder; the log
    survives if asked to.
    """

    name: str
    url: str
    port: int
    folder: Path
    process: subprocess.Popen[bytes]
    stop_signal: signal.Signals = signal.SIGTERM

    def __post_init__(self) -> None:
        warden.watch(self.pid, self.stop_signal, self.folder)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def cpu_seconds(self) -> float:
        """What its process and that one's children have used so far, also those
        children that ended.
        """
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if int(stat.parent.name) == self.pid:
                ticks += sum(map(int, fields[11:15]))
            elif int(fields[1]) == self.pid:
                ticks += sum(map(int, fields[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self, *, keep_log: bool = False) -> Path | None:
        """Stop it; returns where the log was kept."""
        for number in (self.stop_signal, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGCONT)
                self.process.send_signal(number)
            try:
                self.process.wait(STOP_TIMEOUT_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        kept = None
        if keep_log and self.log.exists():
            KEPT_LOGS.mkdir(parents=True, exist_ok=True)
            kept = Path(shutil.copyfile(self.log, KEPT_LOGS / f"{self.name}-{self.pid}.log"))
        shutil.rmtree(self.folder, ignore_errors=True)
        warden.release(self.pid)
        return kept


def program(name: str, package: str, folders: Sequence[str | Path] = ()) -> Path:
    """The program's path; installs ``package`` with apt if missing and allowed."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return Path(_found(name, package, lambda: shutil.which(name, path=path)))


def library(pattern: str, package: str) -> Path:
    """The shared library whose path below /usr/lib fits; installed like a program."""
    return _found(pattern, package, lambda: next(Path("/usr/lib").glob(pattern), None))


def _found(name: str, package: str, look: Callable[[], T | None]) -> T:
    if (found := look()) is None:
        with INSTALL_LOCK.open("a") as lock:
            # apt refuses a second one; who waited may find what the first installed
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (found := look()) is None:
                _install(package, f"{name} is not on this machine")
                found = look()
    if found is None:
        raise Missing(f"{package} was installed but has no {name}")
    return found


def _install(package: str, reason: str) -> None:
    if os.environ.get("HOLDFAST_INSTALL_ENGINES") == "0":
        raise Missing(f"{reason}, and HOLDFAST_INSTALL_ENGINES=0 forbids to install {package}")
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Missing(f"{reason}, and {package} can only be installed by root with apt")
    print(f"{reason}: installing {package} with apt-get", file=sys.stderr, flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _no_services():
        for command in (
            ["update", "-q"],
            ["install", "-q", "-y", "--no-install-recommends", package],
        ):
            done = subprocess.run(
                ["apt-get", *command], env=environment, capture_output=True, text=True
            )
            if done.returncode:
                raise Missing(
                    f"{reason}, and apt-get {command[0]} failed: {done.stderr.strip()[-300:]}"
                )


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """Debian starts what it installs unless this program says no (101)."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def free_port() -> int:
    """A loopback port that nothing listens on, from the part of ``PORTS`` that is this
    test process's own.

    Not one that was given lately: whoever has it may not listen yet, or not at the
    moment.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    mine = PORTS[worker % PORT_PARTS :: PORT_PARTS]
    while True:
        port = random.SystemRandom().choice(mine)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.append(port)
                return port


def own_folder(name: str, owner: str | None) -> Path:
    """A new temporary folder that ``owner`` can use."""
    folder = Path(tempfile.mkdtemp(prefix=f"holdfast-{name}-"))
    if owner is not None:
        entry = pwd.getpwnam(owner)
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    return folder


def unprivileged(*candidates: str) -> str | None:
    """Whom to run as: None for the present user, another one when that is root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in (*candidates, "nobody") if name in known), None)


def as_user(owner: str | None) -> dict[str, object]:
    """Arguments for ``subprocess`` that run the child as ``owner``."""
    if owner is None:
        return {}
    entry = pwd.getpwnam(owner)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _started_by(process: subprocess.Popen[bytes]) -> list[int]:
    """Handles of the processes that it has started, which may be sessions of their own.
    It is stopped, so that it starts no more of them.
    """
    process.send_signal(signal.SIGSTOP)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [os.pidfd_open(int(pid)) for pid in children.split()]


@contextlib.contextmanager
def stopped_whole(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop a process and those that it started; they go on when the block ends."""
    started = _started_by(process)
    try:
        for each in started:
            signal.pidfd_send_signal(each, signal.SIGSTOP)
        yield
    finally:
        for each in started:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(each, signal.SIGCONT)
            os.close(each)
        process.send_signal(signal.SIGCONT)


def kill_whole(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those that it started."""
    started = _started_by(process)
    process.kill()
    for each in started:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(each, signal.SIGKILL)
    process.wait()
    for each in started:
        select.select([each], [], [])  # until it has ended
        os.close(each)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Poll until ``ready``; an early end or the deadline raises, with the log's end."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            if process.poll() is None:
                process.kill()
                process.wait()
            raise RuntimeError(f"the engine did not start; the end of its log:\n{tail}")
        time.sleep(0.02)
