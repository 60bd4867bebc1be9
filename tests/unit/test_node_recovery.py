"""An admin key that is made in the state directory of a stopped server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.access.contract import ApiKey
from holdfast.access.keys import KEYS_MAX, KeyRing, new_key
from holdfast.access.principal import ADMIN_SCOPES
from holdfast.access.secrets import (
    FileCredentials,
    open_secrets,
    read_keys,
    read_secrets,
    write_keys,
)
from holdfast.errors import InvalidMessage, StateDirectory
from holdfast.node import recovery
from holdfast.node.recovery import create_admin_key
from holdfast.node.state_dir import held
from holdfast.store.contract import AuditRecord
from holdfast.store.sqlite import SqliteStore

AT = "2026-01-01T00:00:00.000Z"


def audited(state: Path) -> list[AuditRecord]:
    async def read() -> list[AuditRecord]:
        async with SqliteStore(state / "chats.db") as store:
            return list((await store.audit(None, 10)).records)

    return asyncio.run(read())


def revoke_own_key(state: Path) -> None:
    async def revoke() -> None:
        ring = await KeyRing.load(FileCredentials(state))
        await ring.revoke(ring.find(read_secrets(state).admin_key).key_id, force=True)

    asyncio.run(revoke())


def test_it_opens_what_was_locked_and_voids_nothing(tmp_path: Path) -> None:
    before = open_secrets(tmp_path, AT)
    backend, _ = new_key("tenant", "backend", AT, tenant="acme")
    write_keys(tmp_path / "keys.json", [*read_keys(tmp_path / "keys.json"), backend])
    revoke_own_key(tmp_path)
    key, secret = create_admin_key(tmp_path, "back in", reason="ticket 7")
    after = open_secrets(tmp_path, AT)
    ring = asyncio.run(KeyRing.load(FileCredentials(tmp_path)))
    assert ring.find(secret) == key and set(key.scopes) == ADMIN_SCOPES and backend in ring.list()
    assert after.jwt_secret == before.jwt_secret, "every token goes on"
    assert after.admin_key == secret, "commands on this machine work again without --token"
    assert (tmp_path / "secrets.json").stat().st_mode & 0o777 == 0o600
    (record,) = audited(tmp_path)
    assert (record.action, record.target, record.reason) == ("key_issued", key.key_id, "ticket 7")


def test_the_state_directorys_own_key_stays_while_it_is_good(tmp_path: Path) -> None:
    before = open_secrets(tmp_path, AT)
    create_admin_key(tmp_path, "another")
    assert read_secrets(tmp_path) == before


def test_a_narrow_key_does_not_become_the_state_directorys_own(tmp_path: Path) -> None:
    before = open_secrets(tmp_path, AT)
    revoke_own_key(tmp_path)
    key, _ = create_admin_key(tmp_path, "looks", ["status:read"])
    assert key.scopes == ("status:read",) and read_secrets(tmp_path) == before


def test_a_ring_that_somebody_filled_keeps_nobody_out(tmp_path: Path) -> None:
    open_secrets(tmp_path, AT)
    full = [
        ApiKey(f"key_{n}", "tenant", "acme", "x", ("chats:read",), AT, f"{n:064x}", "abcd")
        for n in range(KEYS_MAX)
    ]
    write_keys(tmp_path / "keys.json", full)
    key, _ = create_admin_key(tmp_path, "back in")
    assert key in read_keys(tmp_path / "keys.json")


def test_it_needs_the_lock_a_state_directory_and_a_good_label(tmp_path: Path) -> None:
    with pytest.raises(StateDirectory, match="holdfast serve"):
        create_admin_key(tmp_path / "nowhere", "x")
    assert not (tmp_path / "nowhere").exists()
    open_secrets(tmp_path, AT)
    keys = (tmp_path / "keys.json").read_bytes()
    with held(tmp_path), pytest.raises(StateDirectory, match="in use by process"):
        create_admin_key(tmp_path, "x")
    for label, scopes in (("", None), ("x", ["tokens:write"]), ("x", ["no:such"])):
        with pytest.raises(InvalidMessage):
            create_admin_key(tmp_path, label, scopes)
    assert (tmp_path / "keys.json").read_bytes() == keys


def test_without_a_record_there_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_secrets(tmp_path, AT)
    before = read_keys(tmp_path / "keys.json")

    async def unwell(*given: object) -> None:
        raise StateDirectory("the disk is full")

    monkeypatch.setattr(recovery, "_record_key", unwell)
    with pytest.raises(StateDirectory, match="full"):
        create_admin_key(tmp_path, "x")
    assert read_keys(tmp_path / "keys.json") == before
