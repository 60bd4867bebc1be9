"""strace as a fault injector: a running process whose system calls fail or take long,
for as long as we want.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from engines import Impossible, program

PACKAGE = "strace"
ATTACH_SECONDS_MAX = 20.0
MEET_SECONDS_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Injection:
    """What is injected."""

    output: Path

    @property
    def met(self) -> int:
        """How many calls were disturbed by now."""
        text = self.output.read_text()
        return text.count("(INJECTED)") + text.count("(DELAYED)")

    async def meets(self) -> None:
        """Wait until one was."""
        async with asyncio.timeout(MEET_SECONDS_MAX):
            while not self.met:  # noqa: ASYNC110 - another process writes the file
                await asyncio.sleep(0.05)


class Strace:
    """Attaches to processes of this user; Impossible if the system forbids it."""

    def __init__(self) -> None:
        self._program = program("strace", PACKAGE)
        with subprocess.Popen(["sleep", "60"]) as other:
            command = [self._program, "-p", str(other.pid)]
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracing:
                assert tracing.stderr is not None
                said = tracing.stderr.readline()
                tracing.terminate()
            other.kill()
        if "attached" not in said:
            raise Impossible(f"strace may not attach to a process here: {said.strip()[-200:]}")

    @asynccontextmanager
    async def injecting(
        self, pid: int, calls: str, fault: str, output: Path
    ) -> AsyncIterator[Injection]:
        """Inside, calls fail or wait: ``error=EIO``, ``delay_enter=MICROSECONDS``."""
        command = [
            "-f",
            "-p",
            str(pid),
            "-o",
            str(output),
            "-e",
            f"trace={calls}",
            "-e",
            f"inject={calls}:{fault}",
        ]
        tracing = await asyncio.create_subprocess_exec(
            self._program, *command, stderr=asyncio.subprocess.PIPE
        )
        assert tracing.stderr is not None
        async with asyncio.timeout(ATTACH_SECONDS_MAX):
            said = await tracing.stderr.readline()
        assert b"attached" in said, said
        try:
            yield Injection(output)
        finally:
            tracing.terminate()
            await tracing.wait()
