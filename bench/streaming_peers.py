"""LiteLLM's proxy before the same model, in its own virtual environment
(`make bench-peers`).

Its only worker has no database, no telemetry and no callbacks; the price list comes
from its package, so nothing leaves the machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from reply_load import MODEL, ReplyServer

from harness import ROOT, say

LITELLM = ROOT / ".venv-peers" / "bin" / "litellm"
START_SECONDS = 120.0
KEY = "sk-bench"


@contextmanager
def litellm(upstream: str) -> Iterator[ReplyServer | None]:
    """A proxy that is ready, or None if it is not installed or does not start."""
    if not LITELLM.exists():
        say("LiteLLM is not installed (make bench-peers): its ratios are left out")
        yield None
        return
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="holdfast-litellm-") as folder:
        process = _start(Path(folder), upstream, port)
        try:
            yield _ready(process, port, Path(folder) / "log")
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(folder: Path, upstream: str, port: int) -> subprocess.Popen[bytes]:
    params = {"model": f"openai/{MODEL}", "api_base": upstream, "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": params}],
        "litellm_settings": {"telemetry": False, "num_retries": 0},
        "general_settings": {"master_key": KEY, "disable_spend_logs": True},
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    quiet = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_TELEMETRY": "False",
        "LITELLM_MODE": "PRODUCTION",
        "HOME": str(folder),
        "NO_PROXY": "*",
    }
    address = ["--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [LITELLM, "--config", folder / "config.yaml", *address, "--telemetry", "False"],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, **quiet},
        )


def _ready(process: subprocess.Popen[bytes], port: int, log: Path) -> ReplyServer | None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=1):
                return ReplyServer(f"http://127.0.0.1:{port}/v1", KEY, process.pid)
        except OSError:
            time.sleep(0.2)
    say(f"LiteLLM did not start, its ratios are left out: {log.read_text()[-500:]}")
    return None
