"""``python -m alerting_server FILE``: a server with the settings of this file that judges
its alerts, and sets its gauges, five times a second instead of every five seconds.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from holdfast import telemetry
from holdfast.node.lifecycle import running
from holdfast.settings import load

PAUSE_SECONDS = 0.2


async def serve(file: Path) -> None:
    settings = load(file, {}, {})
    telemetry.configure_logging(True, "info")
    async with running(settings, gauges_seconds=PAUSE_SECONDS):
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
