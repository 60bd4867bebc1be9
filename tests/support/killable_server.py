"""The server's own command line with three additions for tests.

``HOLDFAST_TEST_KILL_AT=commit.after:17:FILE`` kills the process with SIGKILL behind the
17th commit to ``chats.db`` that reached ``commit.after``
(``holdfast.telemetry.marks`` offers the places) since FILE is there: what a
server commits while it starts does not count. Its last words, in FILE, are the
monotonic time.

``HOLDFAST_TEST_MARKS=path`` appends the coverage marks that the process reaches to this
file.

``python -m killable_server fork`` imports the server once, then forks one child per
line of JSON on its input (``{"settings": {…}, "kill_at": "…", "log": "…", "marks":
"…"}``), so that a hundred kills do not pay for a hundred imports. A child is a server
like any other. It answers ``pid N``, and ``exit N`` when that child has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from holdfast import telemetry
from holdfast.cli import main
from proof.coverage_marks import write_marks


def install(where: str) -> None:
    name, count, armed = where.split(":", 2)
    left = int(count)

    def reached(point: str) -> None:
        nonlocal left
        if point == f"chats.{name}" and Path(armed).exists():
            left -= 1
            if left == 0:
                telemetry.mark("the server was killed", point)
                Path(armed).write_text(f"{time.monotonic()}")
                os.kill(os.getpid(), signal.SIGKILL)

    telemetry.on_mark(reached)


def fork() -> None:
    from holdfast.node.lifecycle import run_node
    from holdfast.settings import load

    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            for stream in (1, 2):
                os.dup2(log, stream)
            write_marks(Path(order["marks"]))
            if order["kill_at"]:
                install(order["kill_at"])
            run_node(load(None, {}, order["settings"]))
            os._exit(0)
        print(f"pid {pid}", flush=True)
        _, status = os.waitpid(pid, 0)
        print(f"exit {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["fork"]:
        fork()
    else:
        if marks := os.environ.pop("HOLDFAST_TEST_MARKS", ""):
            write_marks(Path(marks))
        if kill_at := os.environ.pop("HOLDFAST_TEST_KILL_AT", ""):
            install(kill_at)
        main()
