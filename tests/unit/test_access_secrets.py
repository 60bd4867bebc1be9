"""The secrets of a state directory, and those that several nodes share."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from holdfast.access.contract import ApiKey
from holdfast.access.keys import KeyRing
from holdfast.access.principal import ADMIN_SCOPES
from holdfast.access.secrets import (
    FileCredentials,
    SharedCredentials,
    open_secrets,
    read_secrets,
    write_keys,
)
from holdfast.errors import Forbidden, StateCorrupted, StateDirectory, Unauthorized

AT = "2026-01-01T00:00:00.000Z"


async def test_the_first_start_makes_secrets_only_their_owner_can_read(tmp_path: Path) -> None:
    made = open_secrets(tmp_path, "2026-01-01T00:00:00.000Z")
    ring = await KeyRing.load(FileCredentials(tmp_path))
    assert (tmp_path / "secrets.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600
    assert len(made.jwt_secret) >= 32
    assert ring.find(made.admin_key).kind == "admin"
    assert made.admin_key not in (tmp_path / "keys.json").read_text()


async def test_the_next_start_finds_the_same_secrets(tmp_path: Path) -> None:
    made = open_secrets(tmp_path, "2026-01-01T00:00:00.000Z")
    again = open_secrets(tmp_path, "2026-01-02T00:00:00.000Z")
    ring = await KeyRing.load(FileCredentials(tmp_path))
    assert again == made == read_secrets(tmp_path)
    assert len(ring.list()) == 1


async def test_own_key_of_the_state_directory_gets_newer_scopes(
    tmp_path: Path,
) -> None:
    """Nobody else could hand them out: a key issues only what it carries."""
    made = open_secrets(tmp_path, AT)
    ring = await KeyRing.load(FileCredentials(tmp_path))
    other, _ = await ring.issue("admin", "monitoring", AT, scopes=["status:read"])
    older = ("audit:read", "keys:write", "status:read")
    write_keys(
        tmp_path / "keys.json", [structs.replace(ring.find(made.admin_key), scopes=older), other]
    )
    open_secrets(tmp_path, AT)
    ring = await KeyRing.load(FileCredentials(tmp_path))
    assert set(ring.find(made.admin_key).scopes) == ADMIN_SCOPES
    assert other in ring.list(), "a key somebody made narrow stays so"
    assert (await KeyRing.load(FileCredentials(tmp_path))).list() == ring.list()


async def test_a_revoked_key_of_the_state_directory_stays_revoked(tmp_path: Path) -> None:
    made = open_secrets(tmp_path, AT)
    ring = await KeyRing.load(FileCredentials(tmp_path))
    await ring.revoke(ring.find(made.admin_key).key_id, force=True)
    open_secrets(tmp_path, AT)
    ring = await KeyRing.load(FileCredentials(tmp_path))
    with pytest.raises(Unauthorized):
        ring.find(made.admin_key)


async def test_new_secrets_put_the_old_admin_key_out_of_force_and_no_other(tmp_path: Path) -> None:
    """Removing a file that others may have read is how its secrets are made void; its
    key once lived on.
    """
    leaked = open_secrets(tmp_path, AT)
    ring = await KeyRing.load(FileCredentials(tmp_path))
    other, _ = await ring.issue("admin", "monitoring", AT, scopes=["status:read"])
    (tmp_path / "secrets.json").unlink()
    made = open_secrets(tmp_path, AT)
    ring = await KeyRing.load(FileCredentials(tmp_path))
    assert made.jwt_secret != leaked.jwt_secret
    with pytest.raises(Unauthorized):
        ring.find(leaked.admin_key)
    assert {key.key_id for key in ring.list()} == {other.key_id, ring.find(made.admin_key).key_id}


def test_secrets_do_not_show_themselves(tmp_path: Path) -> None:
    made = open_secrets(tmp_path, "2026-01-01T00:00:00.000Z")
    assert made.jwt_secret not in f"{made!r} {made}"


def test_a_directory_without_secrets_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StateDirectory, match="holdfast serve"):
        read_secrets(tmp_path)


def test_broken_secrets_are_named_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "secrets.json").write_text("{")
    (tmp_path / "secrets.json").chmod(0o600)
    with pytest.raises(
        StateCorrupted, match=r"secrets\.json is not a file of secrets .*put a copy of it back"
    ):
        open_secrets(tmp_path, "2026-01-01T00:00:00.000Z")
    assert (tmp_path / "secrets.json").read_text() == "{"


def test_secrets_that_others_can_read_are_refused_and_the_remedy_named(tmp_path: Path) -> None:
    open_secrets(tmp_path, "2026-01-01T00:00:00.000Z")
    (tmp_path / "secrets.json").chmod(0o640)
    with pytest.raises(StateDirectory, match="chmod 600"):
        open_secrets(tmp_path, "2026-01-01T00:00:00.000Z")


async def test_nodes_on_shared_files_have_the_same_secret_and_keys(tmp_path: Path) -> None:
    made = open_secrets(tmp_path, AT)
    shared = SharedCredentials(tmp_path)
    ring, own = await KeyRing.load(shared), await KeyRing.load(FileCredentials(tmp_path))
    assert (await shared.load()).token_keys == [made.jwt_secret.encode()]
    assert ring.list() == own.list() and ring.find(made.admin_key).kind == "admin"


async def test_shared_keys_are_not_changed_here_and_the_refusal_says_where(tmp_path: Path) -> None:
    made = open_secrets(tmp_path, AT)
    before = (tmp_path / "keys.json").read_bytes()
    ring, recorded = await KeyRing.load(SharedCredentials(tmp_path)), list[ApiKey]()

    async def record(key: ApiKey) -> None:
        recorded.append(key)

    where = f"{tmp_path}.*access.credentials_dir"
    with pytest.raises(Forbidden, match=where):
        await ring.issue("tenant", "backend", AT, tenant="acme", record=record)
    with pytest.raises(Forbidden, match=where):
        await ring.revoke(ring.find(made.admin_key).key_id, force=True, record=record)
    with pytest.raises(Forbidden, match=where):
        await SharedCredentials(tmp_path).save([], (await SharedCredentials(tmp_path).load())[2])
    assert not recorded and (tmp_path / "keys.json").read_bytes() == before


async def test_shared_key_revoked_elsewhere_is_refused_within_5_seconds(tmp_path: Path) -> None:
    open_secrets(tmp_path, AT)
    owner = await KeyRing.load(FileCredentials(tmp_path))
    key, secret = await owner.issue("tenant", "backend", AT, tenant="acme")
    ring = await KeyRing.load(SharedCredentials(tmp_path))
    following = asyncio.create_task(ring.follow())
    assert ring.find(secret) == key
    await owner.revoke(key.key_id)
    await asyncio.sleep(5)
    with pytest.raises(Unauthorized):
        ring.find(secret)
    following.cancel()


async def test_shared_keys_stay_in_force_while_their_file_cannot_be_read(tmp_path: Path) -> None:
    made = open_secrets(tmp_path, AT)
    ring = await KeyRing.load(SharedCredentials(tmp_path))
    following, file = asyncio.create_task(ring.follow()), tmp_path / "keys.json"
    whole = file.read_bytes()
    with capture_logs() as logged:
        for broken in (None, whole[:20]):
            file.unlink() if broken is None else file.write_bytes(broken)
            await asyncio.sleep(10)
            assert ring.find(made.admin_key).kind == "admin"
    assert [line["event"] for line in logged] == ["access.keys_unread"], "once for one outage"
    file.write_text("[]")
    await asyncio.sleep(5)
    with pytest.raises(Unauthorized):
        ring.find(made.admin_key)
    following.cancel()


async def test_shared_directory_that_lacks_a_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StateDirectory, match=r"must have secrets\.json and keys\.json"):
        await SharedCredentials(tmp_path).load()
    open_secrets(tmp_path, AT)
    (tmp_path / "keys.json").unlink()
    with pytest.raises(StateDirectory, match=r"must have secrets\.json and keys\.json"):
        await SharedCredentials(tmp_path).load()


async def test_shared_secrets_that_everybody_can_read_are_refused(tmp_path: Path) -> None:
    open_secrets(tmp_path, AT)
    (tmp_path / "secrets.json").chmod(0o444)
    with pytest.raises(StateDirectory, match="chmod o="):
        await SharedCredentials(tmp_path).load()
