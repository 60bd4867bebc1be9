"""A lost file of revocations: the server starts once it is put back or given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.access.revocations.contract import Revocation
from holdfast.access.secrets import open_secrets
from holdfast.cli.app import app
from holdfast.clock import SystemClock
from holdfast.errors import StateCorrupted
from holdfast.message import User
from holdfast.node.revocations_file import open_revocations
from holdfast.node.state_dir import held
from holdfast.store.commands import CommandContext
from holdfast.store.sqlite import SqliteStore

AT = "2026-01-01T00:00:00.000Z"


def opened(state: Path, *recorded: str) -> int:
    """Open the file as a start does, after these acts; how many revocations it has."""

    async def start() -> int:
        async with SqliteStore(state / "chats.db") as store:
            for action in recorded:
                await store.record(
                    CommandContext(User("", "key_1"), AT, "", operator=True),
                    action,
                    "default/mallory",
                )
            revocations = await open_revocations(state, SystemClock(), store)
            if "user.ban" in recorded:
                await revocations.add(Revocation("ban", "default", "mallory", "", 0, AT, None))
            found = len(await revocations.all())
            await revocations.close()
            return found

    return asyncio.run(start())


def reset(state: Path) -> tuple[int, str]:
    done = CliRunner().invoke(
        app, ["revoke", "reset", "--state-dir", str(state), "--reason", "disk lost"]
    )
    return done.exit_code, done.output


@pytest.fixture
def state(tmp_path: Path) -> Path:
    open_secrets(tmp_path, AT)
    assert opened(tmp_path, "key_issued", "member.ban", "user.erase") == 0
    (tmp_path / "access.db").unlink()
    assert opened(tmp_path) == 0, "what was never revoked is not missed"
    return tmp_path


@pytest.mark.parametrize(
    "lose", [Path.unlink, lambda file: file.write_bytes(b"")], ids=["gone", "empty"]
)
def test_server_without_the_revocations_it_has_made_does_not_start(
    lose: Callable[[Path], object], state: Path, tmp_path: Path
) -> None:
    assert opened(state, "user.ban") == 1
    file, copy = state / "access.db", (state / "access.db").read_bytes()
    lose(file)
    for _ in range(2):
        with pytest.raises(
            StateCorrupted, match=r"access\.db is gone.*put it back.*holdfast revoke reset"
        ):
            opened(state)
    file.write_bytes(copy)
    assert opened(state) == 1


@pytest.mark.parametrize(
    "act", ["token.revoke", "user.revoke", "device.revoke", "tenant.revoke", "user.mute"]
)
def test_every_kind_of_revocation_is_missed(act: str, state: Path) -> None:
    opened(state, act)
    (state / "access.db").unlink()
    with pytest.raises(StateCorrupted):
        opened(state)


def test_lost_revocations_are_given_up_by_a_command_that_is_recorded(state: Path) -> None:
    opened(state, "user.ban")
    code, said = reset(state)
    assert code == 1 and "access.db is there" in said and opened(state) == 1
    (state / "access.db").unlink()
    with held(state):
        code, said = reset(state)
        assert code == 1 and "in use by process" in said
    code, said = reset(state)
    assert code == 0 and "nobody is cut off" in said and opened(state) == 0

    async def last() -> tuple[str, str, str]:
        async with SqliteStore(state / "chats.db") as store:
            record = (await store.audit(None, 100)).records[-1]
            return record.action, record.target, record.reason

    assert asyncio.run(last()) == ("revocations.reset", "access.db", "disk lost")
