"""Starts nodes by forking a process that has imported them: a hundred starts do not pay
for a hundred imports.

``python -m node_forks`` forks one node per line of JSON on its input (``{"settings": …,
"log": …, "namespace": …, "gauges_seconds": …}``) and answers with its pid. Its nodes
outlive it; whoever asked ends them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from program import ROOT

from holdfast.node.supervisor import GAUGES_SECONDS


class ForkedNode:
    """A node's process, until its end."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._handle, number)

    async def ended(self) -> None:
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        own = os.dup(self._handle)  # another task may wait, too
        loop.add_reader(own, end.set)
        try:
            await end.wait()
        finally:
            loop.remove_reader(own)
            os.close(own)

    async def kill(self) -> None:
        """As a crash does: nothing is ended, nobody is notified."""
        self.send(signal.SIGKILL)
        await self.ended()


def fork_node(
    settings: Mapping[str, Any],
    log: Path,
    namespace: str | None = None,
    environment: Mapping[str, str] | None = None,
    gauges_seconds: float = GAUGES_SECONDS,
) -> ForkedNode:
    """A node that begins to start, in this network namespace or in that of the tests,
    and with these variables of the environment, too. It sets its gauges and judges its
    alerts so often.
    """
    parent = _parent(tuple(sorted((environment or {}).items())))
    assert parent.stdin is not None and parent.stdout is not None
    # The parent keeps the network of the test that was first to need it.
    own = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"
    order = {
        "settings": settings,
        "log": str(log),
        "namespace": namespace or own,
        "gauges_seconds": gauges_seconds,
    }
    parent.stdin.write(json.dumps(order) + "\n")
    parent.stdin.flush()
    return ForkedNode(int(parent.stdout.readline()))


@cache
def _parent(environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """One for each test process and environment; it ends when its input does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    path = os.pathsep.join(str(ROOT / part) for part in ("src", "tests", "tests/support"))
    return subprocess.Popen(
        [sys.executable, "-m", "node_forks"],
        env={**kept, "PYTHONPATH": path, **dict(environment)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def main() -> None:
    import aiohttp
    import redis.asyncio
    from cluster_links import enter

    import holdfast.streaming.pool.redis
    import holdfast.streaming.reply_log.redis
    from holdfast.node.lifecycle import run_node
    from holdfast.settings import load

    assert aiohttp and redis and holdfast, "imported once for all nodes"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            for stream in (1, 2):
                os.dup2(log, stream)
            try:
                enter(order["namespace"])
                settings = load(None, {}, order["settings"])
                run_node(settings, gauges_seconds=order["gauges_seconds"])
            except BaseException as error:
                os.write(2, f"{error!r}\n".encode())
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
