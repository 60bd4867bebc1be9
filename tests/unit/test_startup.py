"""A start is quick because it loads what it needs: commands no server, a server no
command and no HTTP client.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
SERVER = {"starlette", "uvicorn", "picows", "uvloop", "apsw", "prometheus_client"}


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        (
            "holdfast.cli.app",
            {*SERVER, "aiohttp", "yaml", "jwt", "cryptography", "rich.table", "rich.progress"},
        ),
        ("holdfast.node.lifecycle", {"aiohttp", "yaml", "typer", "asyncpg", "redis", "hypothesis"}),
    ],
)
def test_what_is_not_needed_is_not_loaded(module: str, unwanted: set[str]) -> None:
    program = f"import sys, {module}; print(*sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not unwanted & set(loaded.stdout.split())
