"""One suite for every CredentialStore: saved keys are loaded, no change is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from credentials import MemoryCredentials

from holdfast.access.contract import ApiKey, CredentialStore
from holdfast.access.keys import KeyRing, new_key
from holdfast.access.secrets import FileCredentials, open_secrets
from holdfast.errors import Unauthorized, VersionConflict

AT = "2026-01-01T00:00:00.000Z"


def files(folder: Path) -> CredentialStore:
    open_secrets(folder, AT)
    return FileCredentials(folder)


def memory(folder: Path) -> CredentialStore:
    return MemoryCredentials()


@pytest.fixture(params=[files, memory])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CredentialStore:
    make: Callable[[Path], CredentialStore] = request.param
    return make(tmp_path)


def a_key(label: str) -> ApiKey:
    return new_key("tenant", label, AT, tenant="acme")[0]


async def test_saved_keys_are_loaded_with_the_version_that_save_returned(
    store: CredentialStore,
) -> None:
    before, key = await store.load(), a_key("backend")
    version = await store.save([*before.keys, key], before.version)
    after = await store.load()
    assert list(after.keys) == [*before.keys, key]
    assert after.version == version != before.version


async def test_token_keys_are_long_and_stay_when_keys_change(store: CredentialStore) -> None:
    before = await store.load()
    assert before.token_keys and all(len(each) >= 32 for each in before.token_keys)
    await store.save([a_key("backend")], before.version)
    assert (await store.load()).token_keys == before.token_keys


async def test_save_under_an_old_version_is_refused_and_changes_nothing(
    store: CredentialStore,
) -> None:
    before, first = await store.load(), a_key("first")
    await store.save([first], before.version)
    with pytest.raises(VersionConflict):
        await store.save([a_key("second")], before.version)
    assert list((await store.load()).keys) == [first]


async def test_two_rings_on_one_store_lose_none_of_their_changes(store: CredentialStore) -> None:
    one, two = await KeyRing.load(store), await KeyRing.load(store)
    _, of_one = await one.issue("tenant", "one", AT, tenant="acme")
    key, of_two = await two.issue("tenant", "two", AT, tenant="acme")
    _, later = await one.issue("tenant", "later", AT, tenant="acme")
    await two.revoke(key.key_id)
    ring = await KeyRing.load(store)
    assert {ring.find(of_one).label, ring.find(later).label} == {"one", "later"}
    with pytest.raises(Unauthorized):
        ring.find(of_two)


async def test_credentials_do_not_show_their_secrets(store: CredentialStore) -> None:
    loaded = await store.load()
    assert loaded.token_keys[0].decode() not in f"{loaded!r} {loaded}"
