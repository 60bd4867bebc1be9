"""Ends the engines of a run that was killed, which can no longer do it itself.

A small process per run, started with its first engine and in a session of its own, so
that what kills the run does not kill it too. On its input it gets each engine (``PID
SIGNAL FOLDER`` when it starts, ``PID`` when it was stopped), and it watches the run.
When that has ended, by whatever means, it stops what is left and removes its folder.

It holds processes by pidfd: a number that was given to another process since is never
signalled. Where the system has no pidfd (Linux has) there is no warden, and a killed
run leaves its engines behind.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field

STOP_TIMEOUT_MS = 10_000

_warden: subprocess.Popen[bytes] | None = None
_owner = 0


def watch(pid: int, stop_signal: signal.Signals, folder: os.PathLike[str]) -> None:
    """From now on this process ends with ours, unless it is released before."""
    global _warden, _owner
    if not hasattr(os, "pidfd_open"):
        return
    if _warden is None or _owner != os.getpid():
        _owner = os.getpid()
        _warden = subprocess.Popen(
            [sys.executable, "-I", __file__, str(_owner)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
    _tell(f"{pid} {int(stop_signal)} {os.fspath(folder)}")


def release(pid: int) -> None:
    """It was stopped by us."""
    if _warden is not None and _owner == os.getpid():
        _tell(str(pid))


def _tell(line: str) -> None:
    assert _warden is not None and _warden.stdin is not None
    _warden.stdin.write(f"{line}\n".encode())
    _warden.stdin.flush()


@dataclass(slots=True)
class Ward:
    """An engine that is watched."""

    pidfd: int
    stop_signal: int
    folder: str

    def end(self) -> None:
        """Stop it, by force if it takes too long, and remove what it kept."""
        for number in (signal.SIGCONT, self.stop_signal, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)
            if number != signal.SIGCONT and _ended(self.pidfd, STOP_TIMEOUT_MS):
                break
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(slots=True)
class Wards:
    """The engines of one run, by pid."""

    held: dict[int, Ward] = field(default_factory=dict)
    unread: bytes = b""

    def hear(self, data: bytes) -> None:
        """Take in what the run says, in whatever pieces it comes."""
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            pid, *rest = line.decode().split(" ", 2)
            if stopped := self.held.pop(int(pid), None):
                os.close(stopped.pidfd)
            if rest:
                with contextlib.suppress(ProcessLookupError):
                    self.held[int(pid)] = Ward(os.pidfd_open(int(pid)), int(rest[0]), rest[1])

    def end(self) -> None:
        for ward in self.held.values():
            ward.end()


def _ended(pidfd: int, timeout_ms: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def main(run: int) -> None:
    """Listen until the run has ended, also if a process that it forked still holds its
    end of the pipe.
    """
    wards = Wards()
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    with contextlib.suppress(ProcessLookupError):
        poll.register(os.pidfd_open(run), select.POLLIN)
    while (ready := [fd for fd, _ in poll.poll()]) and sys.stdin.fileno() in ready:
        if not (data := os.read(sys.stdin.fileno(), 65_536)):
            break
        wards.hear(data)
    wards.end()


if __name__ == "__main__":
    main(int(sys.argv[1]))
