"""The engine helper itself: what it starts works, what it cannot have it says, what it stops is gone."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import asyncpg
import pytest

from engines import Missing, Server, program
from engines.postgres import start


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


def test_a_program_that_may_not_be_installed_is_missing_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_INSTALL_ENGINES", "0")
    with pytest.raises(Missing, match="HOLDFAST_INSTALL_ENGINES=0 forbids to install some-package"):
        program("no-such-program-here", "some-package")


def test_a_program_is_found_in_the_folders_named_first(tmp_path: Path) -> None:
    mine = tmp_path / "initdb"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    assert program("initdb", "postgresql", [tmp_path]) == mine
