"""strace as a fault injector: a running process whose system calls fail or take long, for as long as we want."""

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


@dataclass(slots=True)
class Injection:
    """What was injected: ``met`` counts the calls that were disturbed, after the end."""

    met: int = 0


class Strace:
    """Attaches to processes of this user; Impossible where the system does not allow it."""

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
    async def injecting(self, pid: int, calls: str, fault: str, output: Path) -> AsyncIterator[Injection]:
        """While inside, these calls of all threads are disturbed: ``error=EIO``, ``delay_enter=MICROSECONDS``."""
        command = ["-f", "-p", str(pid), "-o", str(output), "-e", f"trace={calls}", "-e", f"inject={calls}:{fault}"]
        tracing = await asyncio.create_subprocess_exec(self._program, *command, stderr=asyncio.subprocess.PIPE)
        assert tracing.stderr is not None
        async with asyncio.timeout(ATTACH_SECONDS_MAX):
            said = await tracing.stderr.readline()
        assert b"attached" in said, said
        injection = Injection()
        try:
            yield injection
        finally:
            tracing.terminate()
            await tracing.wait()
            injection.met = _disturbed(output)


def _disturbed(output: Path) -> int:
    text = output.read_text()
    return text.count("(INJECTED)") + text.count("(DELAYED)")
