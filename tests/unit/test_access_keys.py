"""API keys: shown once, kept hashed, scoped, revocable, saved before they count."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
from credentials import SECRET, MemoryCredentials, key_ring
from msgspec import structs

from holdfast.access.contract import ApiKey, Credentials
from holdfast.access.keys import KeyRing, is_api_key, new_key
from holdfast.access.principal import ADMIN_SCOPES, TENANT_SCOPES, USER_SCOPES, KeyScope
from holdfast.access.secrets import FileCredentials, open_secrets, read_keys, write_keys
from holdfast.errors import (
    Forbidden,
    InvalidMessage,
    InvalidRule,
    NotFound,
    StateCorrupted,
    Unauthorized,
)
from holdfast.limits.rule_json import check_names

AT = "2026-01-01T00:00:00.000Z"


async def test_a_tenant_key_is_found_by_its_secret_and_acts_for_the_user_it_names() -> None:
    ring = key_ring()
    key, secret = await ring.issue("tenant", "backend", AT, tenant="acme")
    assert secret.startswith("hf_tenant_") and is_api_key(secret)
    assert ring.find(secret) == key
    principal = key.principal("alice")
    assert (principal.tenant, principal.user_id, principal.kind) == ("acme", "alice", "tenant_key")
    assert principal.scopes == TENANT_SCOPES | USER_SCOPES, (
        "chats:write includes what users' tokens name one by one"
    )


async def test_an_admin_key_belongs_to_no_tenant_and_can_act_for_nobody() -> None:
    ring = key_ring()
    key, secret = await ring.issue("admin", "laptop", AT, scopes=["status:read"])
    assert secret.startswith("hf_admin_") and is_api_key(secret)
    principal = key.principal("alice")
    assert (principal.tenant, principal.user_id, principal.kind) == ("", key.key_id, "admin_key")
    assert principal.scopes == {"status:read"}


async def test_a_secret_has_256_random_bits_and_is_never_kept() -> None:
    ring = key_ring()
    issued = [await ring.issue("tenant", "backend", AT, tenant="acme") for _ in range(50)]
    assert len({secret for _, secret in issued}) == 50
    for key, secret in issued:
        assert len(secret.removeprefix("hf_tenant_")) == 43
        assert secret not in repr(key) and key.last_four == secret[-4:]


@pytest.mark.parametrize(
    "guess", ["", "hf_tenant_", "hf_tenant_" + "A" * 43, "hf_admin_\ud800", "é"]
)
async def test_an_unknown_key_is_unauthorized(guess: str) -> None:
    ring = key_ring()
    await ring.issue("tenant", "backend", AT, tenant="acme")
    with pytest.raises(Unauthorized):
        ring.find(guess)


async def test_the_digest_of_a_key_is_not_a_key() -> None:
    ring = key_ring()
    key, _ = await ring.issue("tenant", "backend", AT, tenant="acme")
    with pytest.raises(Unauthorized):
        ring.find(key.digest)


async def test_a_revoked_key_is_dead_and_the_others_live() -> None:
    ring = key_ring()
    key, secret = await ring.issue("tenant", "old", AT, tenant="acme")
    _, other = await ring.issue("tenant", "new", AT, tenant="acme")
    await ring.revoke(key.key_id)
    with pytest.raises(Unauthorized):
        ring.find(secret)
    assert ring.find(other).label == "new"
    with pytest.raises(NotFound):
        await ring.revoke(key.key_id)


@pytest.mark.parametrize(
    ("kind", "label", "tenant", "scopes", "field"),
    [
        ("tenant", "", "acme", None, "label"),
        ("tenant", "x" * 101, "acme", None, "label"),
        ("tenant", "a\nb", "acme", None, "label"),
        ("tenant", "backend", "", None, "tenant"),
        ("tenant", "backend", "a b", None, "tenant"),
        ("tenant", "backend", "*", None, "tenant"),
        ("admin", "laptop", "acme", None, "tenant"),
        ("tenant", "backend", "acme", [], "scopes"),
        ("tenant", "backend", "acme", ["keys:write"], "scopes"),
        ("admin", "laptop", "", ["tokens:write"], "scopes"),
        ("admin", "laptop", "", ["everything"], "scopes"),
    ],
)
async def test_a_key_that_asks_for_what_its_kind_cannot_have_is_refused(
    kind: str, label: str, tenant: str, scopes: Sequence[str] | None, field: str
) -> None:
    ring = key_ring()
    with pytest.raises(InvalidMessage) as caught:
        await ring.issue(kind, label, AT, tenant=tenant, scopes=scopes)  # type: ignore[arg-type]
    assert caught.value.details["field"] == field
    assert ring.list() == []


@pytest.mark.parametrize("tenant", ["a*", "*a", "{a}", "a{b", "}"])
async def test_no_key_is_made_for_a_tenant_that_no_rule_could_name(tenant: str) -> None:
    with pytest.raises(InvalidMessage, match="no rule of limits could name it"):
        await key_ring().issue("tenant", "backend", AT, tenant=tenant)
    with pytest.raises(InvalidRule):
        check_names({"tenantID": tenant})


async def test_a_kept_key_of_a_tenant_that_cannot_be_is_not_known() -> None:
    key, secret = await key_ring().issue("tenant", "backend", AT, tenant="acme")
    assert key_ring([key]).find(secret) == key
    with pytest.raises(Unauthorized):
        key_ring([structs.replace(key, tenant="*")]).find(secret)


@pytest.mark.parametrize("scope", [*get_args(KeyScope), *sorted(USER_SCOPES)])
def test_every_scope_is_described_in_the_guide(scope: str) -> None:
    guide = Path(__file__).parents[2] / "docs/guides/access.md"
    assert f"| `{scope}` |" in guide.read_text()


def test_chats_write_of_an_admin_key_is_no_users_scope() -> None:
    tenant, _ = new_key("tenant", "k", AT, tenant="acme", scopes=["chats:write"])
    admin, _ = new_key("admin", "k", AT, scopes=["chats:write"])
    assert "chats:send" in tenant.principal().scopes
    assert "chats:send" not in admin.principal().scopes


def test_no_tenant_scope_reaches_across_tenants() -> None:
    assert not TENANT_SCOPES & {"keys:write", "audit:read", "status:read", "backup"}
    assert "tokens:write" not in ADMIN_SCOPES, "an operator cannot become a user"


async def test_the_last_key_that_can_make_keys_is_revoked_by_force_only() -> None:
    ring = key_ring()
    first, secret = await ring.issue("admin", "first", AT)
    await ring.issue("admin", "monitoring", AT, scopes=["status:read"])
    await ring.issue("tenant", "backend", AT, tenant="acme")
    with pytest.raises(Forbidden, match=r"last key that can make keys.*key create admin.*--force"):
        await ring.revoke(first.key_id)
    assert ring.find(secret) == first, "nothing changed"
    second, _ = await ring.issue("admin", "second", AT, scopes=["keys:write"])
    await ring.revoke(first.key_id)
    with pytest.raises(Forbidden):
        await ring.revoke(second.key_id)
    await ring.revoke(second.key_id, force=True)
    assert not any(key.makes_keys for key in ring.list())


async def test_there_is_a_bound_on_keys() -> None:
    key, _ = await key_ring().issue("tenant", "backend", AT, tenant="acme")
    many = [
        ApiKey(f"key_{n}", "tenant", "acme", "x", key.scopes, AT, f"{n:064x}", "abcd")
        for n in range(1000)
    ]
    with pytest.raises(InvalidMessage, match="1000 keys"):
        await key_ring(many).issue("tenant", "backend", AT, tenant="acme")


async def test_keys_survive_a_restart_in_a_file_only_the_owner_can_read(tmp_path: Path) -> None:
    open_secrets(tmp_path, AT)
    path, store = tmp_path / "keys.json", FileCredentials(tmp_path)
    path.unlink()
    ring = await KeyRing.load(store)
    key, secret = await ring.issue("tenant", "backend", AT, tenant="acme")
    gone, gone_secret = await ring.issue("admin", "laptop", AT)
    await ring.revoke(gone.key_id, force=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text() and gone_secret not in path.read_text()
    again = await KeyRing.load(store)
    assert again.find(secret) == key and again.list() == [key]


def test_the_mode_is_0600_whatever_the_umask_and_whatever_lay_there(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    (tmp_path / "keys.json.new").write_text("left by a crash")
    before = os.umask(0)
    try:
        write_keys(path, [])
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["keys.json"]


async def test_a_key_that_could_not_be_saved_does_not_exist() -> None:
    kept, secret = await key_ring().issue("tenant", "backend", AT, tenant="acme")
    ring = key_ring([kept], OSError(28, "No space left on device"))
    with pytest.raises(OSError):
        await ring.issue("tenant", "another", AT, tenant="acme")
    with pytest.raises(OSError):
        await ring.revoke(kept.key_id)
    assert ring.list() == [kept] and kept.last_four == secret[-4:]


@pytest.mark.parametrize("damage", [b"", b"{}", b'[{"key_id": 1}]', b"\xff\xfe", b"[" * 100])
def test_a_damaged_key_file_stops_the_start_with_what_to_do(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(damage)
    with pytest.raises(StateCorrupted, match="restore it"):
        read_keys(path)


async def test_revocation_whose_request_is_cancelled_while_saving_takes_effect() -> None:
    saving, may_save = asyncio.Event(), asyncio.Event()

    class SlowCredentials(MemoryCredentials):
        async def save(self, keys: Sequence[ApiKey], version: str) -> str:
            saving.set()
            await may_save.wait()
            return await super().save(keys, version)

    key, secret = await key_ring().issue("tenant", "backend", AT, tenant="acme")
    ring = KeyRing(SlowCredentials([key]), Credentials([SECRET], [key], "0"))
    revoking = asyncio.create_task(ring.revoke(key.key_id))
    await saving.wait()
    revoking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await revoking
    may_save.set()
    await ring.issue("tenant", "next", AT, tenant="acme")
    with pytest.raises(Unauthorized):
        ring.find(secret)


async def test_ring_reads_shared_keys_at_the_pace_of_its_store_and_when_woken() -> None:
    store = MemoryCredentials()
    one, two = await KeyRing.load(store), await KeyRing.load(store)
    following = asyncio.create_task(two.follow())
    one.on_stored = two.wake
    key, _ = await one.issue("tenant", "backend", AT, tenant="acme")
    await asyncio.sleep(0.1)
    assert two.has(key.key_id), "at once"
    one.on_stored = lambda: None
    await one.revoke(key.key_id, force=True)
    await asyncio.sleep(store.follow_seconds - 0.2)
    assert two.has(key.key_id)
    await asyncio.sleep(0.2)
    assert not two.has(key.key_id), "nobody woke it"
    following.cancel()


async def test_keys_read_before_a_change_do_not_undo_it() -> None:
    class SlowToLoad(MemoryCredentials):
        async def load(self) -> Credentials:
            loaded = await super().load()
            await asyncio.sleep(1)
            return loaded

    ring = await KeyRing.load(SlowToLoad())
    following = asyncio.create_task(ring.follow())
    await asyncio.sleep(SlowToLoad.follow_seconds + 0.5)  # it has read, and not yet used
    key, _ = await ring.issue("tenant", "backend", AT, tenant="acme")
    await asyncio.sleep(1)
    assert ring.has(key.key_id)
    following.cancel()
