"""A Holdfast node for `streaming.py`, in a process of its own:
`python bench/streaming_node.py UPSTREAM [SETTINGS]`.

One model, ``scripted``, runs at the upstream; SETTINGS is JSON by dotted path. The
rules of rates are raised, so that they refuse nothing; those of active replies stay.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from children import obey, used

RATES = ("rest:user", "rest:tenant", "reply:user", "reply:tenant")


async def serve(upstream: str, changes: dict[str, Any]) -> None:
    from holdfast import telemetry
    from holdfast.clock import timestamp
    from holdfast.node.lifecycle import open_files_max, running, settle_heap
    from holdfast.settings import load

    open_files_max()
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as state,
        Path(os.devnull).open("w") as log,  # noqa: ASYNC230
    ):
        telemetry.configure_logging(json=True, stream=log)
        settings = {
            "server.port": 0,
            "server.state_dir": state,
            "streaming.providers": [{"name": "upstream", "base_url": upstream}],
            "streaming.models": [{"name": "scripted", "providers": ["upstream:scripted"]}],
            **changes,
        }
        async with running(load(None, {}, settings)) as node:
            for resource in RATES:
                rule = {"tenantID": "*", "resource": resource, "expectedVersion": 1}
                raised = {"limit": 10**9, "burstSize": 10**9, "reason": "bench"}
                await node.limits.control.update({**rule, **raised}, "bench")
            await node.limits.feed.sync()
            at = timestamp(time.time())
            _, key = await node.keys.issue("tenant", "bench", at, tenant="acme")
            settle_heap()
            await obey({"used": used}, {"url": f"{node.url}/v1", "key": key})


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))
