"""The secrets of a state directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from holdfast.access.keys import KeyRing
from holdfast.access.principal import ADMIN_SCOPES
from holdfast.access.secrets import FileCredentials, open_secrets, read_secrets, write_keys
from holdfast.errors import StateCorrupted, StateDirectory, Unauthorized

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
