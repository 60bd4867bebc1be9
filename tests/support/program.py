"""The ``holdfast`` program as people run it: real processes, sockets and signals."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.request import urlopen

from typer.testing import CliRunner

from engines import free_port
from holdfast.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 100.0
"""When a test gives up; tests of speed have their own, shorter times."""


def eventually(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Poll a condition of another process until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"in vain waited for {what}"
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@contextmanager
def patched_environment(environment: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Program:
    """One state directory and port, and the commands that go there."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._servers: list[subprocess.Popen[str]] = []

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")
        }
        return {
            **kept,
            "PYTHONPATH": str(ROOT / "src"),
            "HOLDFAST_STATE_DIR": str(self.state_dir),
            "HOLDFAST_PORT": str(self.port),
            "COLUMNS": "160",
        }

    def run(self, *arguments: str, stdin: str | bytes = "") -> Ran:
        """A command, in this process: starting an interpreter for each would take most
        of the tests' time.
        """
        with patched_environment(self.environment):
            result = CliRunner().invoke(app, [*arguments], input=stdin, prog_name="holdfast")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    def run_process(self, *arguments: str) -> Ran:
        """A command in its own process, for those that would take this one over."""
        done = self.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output, errors = done.communicate(timeout=PATIENCE_SECONDS)
        return Ran(done.returncode, output, errors)

    def ok(self, *arguments: str, stdin: str = "") -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout

    def start(self, *arguments: str, **pipes: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", *arguments],
            env=self.environment,
            text=True,
            **pipes,
        )

    def serve(self, *options: str) -> subprocess.Popen[str]:
        """A server that answers."""
        with (self.state_dir.parent / "serve.log").open("a") as log:
            server = self.start("serve", *options, stdout=log.fileno(), stderr=log.fileno())
        self._servers.append(server)
        eventually(lambda: server.poll() is not None or self._ready(), "the server")
        assert server.poll() is None, (self.state_dir.parent / "serve.log").read_text()
        return server

    def stop(self) -> None:
        for server in self._servers:
            if server.poll() is None:
                server.terminate()
            server.wait(PATIENCE_SECONDS)

    def _ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/health/ready", timeout=2):
                return True
        except OSError:
            return False


class Terminal:
    """A running ``chat open`` at the end of two pipes."""

    def __init__(self, program: Program, *arguments: str) -> None:
        pipe = subprocess.PIPE
        self.process = program.start(
            "chat", "open", *arguments, stdin=pipe, stdout=pipe, stderr=pipe
        )
        self.lines: list[str] = []
        self.states: list[str] = []
        self._threads = [
            threading.Thread(
                target=self._collect, args=(self.process.stdout, self.lines), daemon=True
            ),
            threading.Thread(
                target=self._collect, args=(self.process.stderr, self.states), daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()

    def type(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def leave(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.ended()

    def ended(self) -> int:
        """Wait for its end and for all it said until then; its exit code."""
        code = self.process.wait(PATIENCE_SECONDS)
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
        return code

    @staticmethod
    def _collect(stream: IO[str], into: list[str]) -> None:
        while line := stream.readline():
            into.append(line.rstrip("\n"))
