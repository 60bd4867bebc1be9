"""The peers before the same model: LiteLLM's proxy in its own virtual environment
(`make bench-peers`), and vLLM's router if somebody has installed it.

LiteLLM's only worker has no database, no telemetry and no callbacks; the price list comes
from its package, so nothing leaves the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from reply_load import MODEL, ReplyServer

from harness import ROOT, say

LITELLM = ROOT / ".venv-peers" / "bin" / "litellm"
START_SECONDS = 120.0
KEY = "sk-bench"


Ready = Callable[[], ReplyServer | None]
"""Waits until a peer is ready; None if it is not installed or does not start."""


@contextmanager
def litellm(upstream: str) -> Iterator[Ready]:
    """The proxy, which starts while other things are measured."""
    if not LITELLM.exists():
        say("LiteLLM is not installed (make bench-peers): its ratios are left out")
        yield lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-litellm-") as folder:
        params = {"model": f"openai/{MODEL}", "api_base": upstream, "api_key": "none"}
        config = {
            "model_list": [{"model_name": MODEL, "litellm_params": params}],
            "litellm_settings": {"telemetry": False, "num_retries": 0},
            "general_settings": {"master_key": KEY, "disable_spend_logs": True},
        }
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        command = [str(LITELLM), "--config", str(path), "--telemetry", "False"]
        with _started("LiteLLM", command, "/health/liveliness", Path(folder)) as ready:
            yield ready


@contextmanager
def vllm_router(upstream: str) -> Iterator[Ready]:
    """vLLM's router in Rust, if ``vllm-router`` is in the path."""
    found = shutil.which("vllm-router")
    if found is None:
        say("vllm-router is not installed: it is left out")
        yield lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-router-") as folder:
        worker = upstream.removesuffix("/v1")
        command = [found, "--worker-urls", worker, "--policy", "round_robin"]
        command += ["--prometheus-port", str(_free_port()), "--log-level", "error"]
        with _started("vllm-router", command, "/health", Path(folder)) as ready:
            yield ready


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _started(name: str, command: list[str], health: str, folder: Path) -> Iterator[Ready]:
    port = _free_port()
    quiet = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_TELEMETRY": "False",
        "LITELLM_MODE": "PRODUCTION",
        "HOME": str(folder),
        "NO_PROXY": "*",
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, **quiet},
        )
    try:
        yield partial(_ready, name, process, f"http://127.0.0.1:{port}", health, folder / "log")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(
    name: str, process: subprocess.Popen[bytes], url: str, health: str, log: Path
) -> ReplyServer | None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url + health, timeout=1):
                return ReplyServer(f"{url}/v1", KEY, process.pid)
        except OSError:
            time.sleep(0.2)
    say(f"{name} did not start, it is left out: {log.read_text()[-500:]}")
    return None
