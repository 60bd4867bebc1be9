"""The engines that tests start: they work, and they leave nothing when stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest
from program import ROOT, eventually

from engines import Missing, Server, free_port, program
from engines.postgres import start

HANGING_TEST = """
import json, os, signal, sys

def test_that_hangs(redis_server, postgres_server):
    os.kill(redis_server.pid, signal.SIGSTOP)
    if (forked := os.fork()) == 0:
        signal.pause()
    engines = {str(each.folder): each.pid for each in (redis_server, postgres_server)}
    print(json.dumps([engines, forked]), flush=True)
    signal.pause()
"""


def test_postgres_keeps_what_it_commits(postgres_server: Server) -> None:
    async def settings() -> dict[str, str]:
        connection = await asyncpg.connect(postgres_server.url)
        try:
            names = ("fsync", "synchronous_commit", "full_page_writes")
            return {name: await connection.fetchval(f"SHOW {name}") for name in names}
        finally:
            await connection.close()

    assert set(asyncio.run(settings()).values()) == {"on"}


def test_a_stopped_server_leaves_nothing(postgres_server: Server) -> None:
    server = start()
    assert server.port != postgres_server.port
    server.stop()
    assert not server.folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the warden needs pidfd")
@pytest.mark.usefixtures("postgres_server", "redis_server")
def test_engines_of_a_killed_run_end_and_leave_nothing(tmp_path: Path) -> None:
    """Also a stopped one, and although a fork of the run still holds its pipes."""
    (tmp_path / "test_hanging.py").write_text(HANGING_TEST)
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-s", "-q", "-p", "engines.fixtures", "test_hanging.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}"},
    )  # fmt: skip
    assert run.stdout is not None
    engines, forked = json.loads(next(line for line in run.stdout if line.startswith(b"[")))
    try:
        assert len(engines) == 2 and all(Path(folder).exists() for folder in engines)
        run.send_signal(signal.SIGKILL)
        run.wait()
        eventually(lambda: not any(map(_runs, engines.values())), "the engines to end")
        eventually(
            lambda: not any(Path(folder).exists() for folder in engines), "their folders to go"
        )
    finally:
        os.kill(forked, signal.SIGKILL)
        run.stdout.close()


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_reserved_port_is_given_to_nobody_else() -> None:
    ports = [free_port() for _ in range(400)]
    assert len(set(ports)) == 400


def test_a_program_that_may_not_be_installed_is_missing_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_INSTALL_ENGINES", "0")
    with pytest.raises(Missing, match="HOLDFAST_INSTALL_ENGINES=0 forbids to install some-package"):
        program("no-such-program-here", "some-package")


def test_a_program_is_found_in_the_folders_named_first(tmp_path: Path) -> None:
    mine = tmp_path / "initdb"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    assert program("initdb", "postgresql", [tmp_path]) == mine
