"""What a test run prints of its proofs: those it made, and no earlier ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from program import PATIENCE_SECONDS, ROOT

from proof.results import Row, write

CONFTEST = """
pytest_plugins = ["result_counts"]
"""
PROOF = """
from result_counts import tally
from proof.results import Row
def test_proves():
    tally(Row("made now", "by hand", 3, 0, "nothing"))
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_run_prints_its_own_proofs_and_no_earlier_ones(workers: str, tmp_path: Path) -> None:
    write(Row("made before", "by hand", 7, 0, "nothing"), tmp_path / "results")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_proof.py").write_text(PROOF)
    path = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests", "tests/support"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # loading them all takes longer than all the rest
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-n", workers),
            *("-p", "no:cacheprovider", tmp_path),
        ],
        cwd=tmp_path,
        env={**kept, **plugins, "PYTHONPATH": path, "HOLDFAST_RESULTS": str(tmp_path / "results")},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_SECONDS,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "made now: 3 runs" in run.stdout and "made before" not in run.stdout
