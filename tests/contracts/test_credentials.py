"""One suite for every CredentialStore: saved keys are loaded, no change is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from cluster_database import another_node, first_node
from credentials import MemoryCredentials
from msgspec import structs

from engines import Server
from holdfast.access.contract import ApiKey, CredentialStore
from holdfast.access.keys import KeyRing, new_key
from holdfast.access.postgres import PostgresCredentials
from holdfast.access.principal import ADMIN_SCOPES
from holdfast.access.secrets import FileCredentials, make_cluster_key, open_secrets, read_secrets
from holdfast.drivers.postgres_database import Database
from holdfast.errors import BadSetting, StateCorrupted, Unauthorized, VersionConflict

AT = "2026-01-01T00:00:00.000Z"
ONE, TWO, THREE = "1" * 32, "2" * 32, "3" * 32
OpenStore = Callable[[], AbstractAsyncContextManager[CredentialStore]]


@asynccontextmanager
async def files(folder: Path) -> AsyncIterator[CredentialStore]:
    open_secrets(folder, AT)
    yield FileCredentials(folder)


@asynccontextmanager
async def memory() -> AsyncIterator[CredentialStore]:
    yield MemoryCredentials()


@asynccontextmanager
async def postgres(url: str, folder: Path) -> AsyncIterator[CredentialStore]:
    async with first_node(url) as database:
        yield await started(database, folder, ONE)


async def started(database: Database, state: Path, *token_keys: str) -> PostgresCredentials:
    """The credentials of a node that starts with these token keys."""
    file = secret_file(state, token_keys)
    return await PostgresCredentials.open(database, file, state, AT)


def secret_file(state: Path, token_keys: Sequence[str]) -> Path:
    state.mkdir(exist_ok=True)
    file = state / "token-keys"
    file.write_text("\n".join(token_keys))
    file.chmod(0o600)
    return file


@pytest.fixture(params=["files", "memory", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Opens the store of a server that starts for the first time."""
    if request.param == "files":
        return partial(files, tmp_path)
    if request.param == "memory":
        return memory
    return partial(postgres, request.getfixturevalue("postgres_server").url, tmp_path)


def a_key(label: str) -> ApiKey:
    return new_key("tenant", label, AT, tenant="acme")[0]


async def test_saved_keys_are_loaded_with_the_version_that_save_returned(
    opened: OpenStore,
) -> None:
    async with opened() as store:
        before, key = await store.load(), a_key("backend")
        version = await store.save([*before.keys, key], before.version)
        after = await store.load()
        assert list(after.keys) == [*before.keys, key]
        assert after.version == version != before.version
        assert await store.load() == after


async def test_token_keys_are_long_and_stay_when_keys_change(opened: OpenStore) -> None:
    async with opened() as store:
        before = await store.load()
        assert before.token_keys and all(len(each) >= 32 for each in before.token_keys)
        await store.save([a_key("backend")], before.version)
        assert (await store.load()).token_keys == before.token_keys


async def test_save_under_an_old_version_is_refused_and_changes_nothing(
    opened: OpenStore,
) -> None:
    async with opened() as store:
        before, first = await store.load(), a_key("first")
        await store.save([first], before.version)
        with pytest.raises(VersionConflict):
            await store.save([a_key("second")], before.version)
        assert list((await store.load()).keys) == [first]


async def test_two_rings_on_one_store_lose_none_of_their_changes(opened: OpenStore) -> None:
    async with opened() as store:
        one, two = await KeyRing.load(store), await KeyRing.load(store)
        _, of_one = await one.issue("tenant", "one", AT, tenant="acme")
        key, of_two = await two.issue("tenant", "two", AT, tenant="acme")
        _, later = await one.issue("tenant", "later", AT, tenant="acme")
        await two.revoke(key.key_id)
        ring = await KeyRing.load(store)
        assert {ring.find(of_one).label, ring.find(later).label} == {"one", "later"}
        with pytest.raises(Unauthorized):
            ring.find(of_two)


async def test_scope_of_a_newer_release_is_kept_and_grants_nothing_here(
    opened: OpenStore,
) -> None:
    async with opened() as store:
        before = await store.load()
        newer = structs.replace(a_key("newer"), scopes=("chats:write", "moon:write"))
        await store.save([*before.keys, newer], before.version)
        ring = await KeyRing.load(store)
        await ring.issue("tenant", "other", AT, tenant="acme")
        [found] = [key for key in (await store.load()).keys if key.label == "newer"]
        assert found == newer and "chats:write" in found.principal("alice").scopes


async def test_credentials_do_not_show_their_secrets(opened: OpenStore) -> None:
    async with opened() as store:
        loaded = await store.load()
        assert loaded.token_keys[0].decode() not in f"{loaded!r} {loaded}"


# --- a cluster's credentials
# -------------------------------------------------------------------------------------


async def test_of_nodes_that_start_together_one_makes_the_admin_key_of_all(
    postgres_server: Server, tmp_path: Path
) -> None:
    url = postgres_server.url
    async with first_node(url), AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(another_node(url)) for _ in range(5)]
        states = [tmp_path / f"node-{number}" for number in range(5)]
        stores = await asyncio.gather(
            *(started(node, state, ONE) for node, state in zip(nodes, states, strict=True))
        )
        [first] = [state for state in states if (state / "secrets.json").exists()]
        admin_key = read_secrets(first).admin_key
        for store in stores:
            ring = await KeyRing.load(store)
            assert ring.find(admin_key).makes_keys and len(ring.list()) == 1


async def test_start_that_stopped_before_its_commit_is_finished_by_the_next(
    postgres_server: Server, tmp_path: Path
) -> None:
    async with first_node(postgres_server.url) as database:
        make_cluster_key(tmp_path, AT)  # all that such a start leaves behind
        ring = await KeyRing.load(await started(database, tmp_path, ONE))
        assert ring.find(read_secrets(tmp_path).admin_key).makes_keys and len(ring.list()) == 1


async def test_admin_key_of_a_node_gets_newer_scopes_at_its_start(
    postgres_server: Server, tmp_path: Path
) -> None:
    async with first_node(postgres_server.url) as database:
        store = await started(database, tmp_path, ONE)
        loaded = await store.load()
        older = structs.replace(loaded.keys[0], scopes=("keys:write",))
        await store.save([older], loaded.version)
        await started(database, tmp_path / "other", ONE)
        assert list((await store.load()).keys) == [older], "another node's key"
        again = await started(database, tmp_path, ONE)
        assert set((await again.load()).keys[0].scopes) == ADMIN_SCOPES


async def test_token_keys_are_replaced_node_by_node(
    postgres_server: Server, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    async with first_node(postgres_server.url) as database:
        for keys in ((ONE,), (ONE, TWO), (TWO, ONE), (TWO,)):
            for state in (one, two):
                store = await started(database, state, *keys)
                assert (await store.load()).token_keys == [key.encode() for key in keys]
        with pytest.raises(BadSetting, match=r"secret_file: no key in .*one/token-keys is one"):
            await started(database, one, ONE)
        await started(database, one, THREE, TWO)


async def test_start_with_token_keys_of_another_cluster_changes_nothing(
    postgres_server: Server, tmp_path: Path
) -> None:
    async with first_node(postgres_server.url) as database:
        await started(database, tmp_path / "one", ONE)
        for _ in range(2):
            with pytest.raises(BadSetting, match="copy the file from a node that runs") as refused:
                await started(database, tmp_path / "two", TWO)
            assert TWO not in refused.value.message
        async with database.committing("be changed") as db:
            await db.execute(refused.value.message.rpartition("run ")[2])
        await started(database, tmp_path / "two", TWO)


async def test_stored_keys_that_this_release_cannot_read_are_named(
    postgres_server: Server, tmp_path: Path
) -> None:
    async with first_node(postgres_server.url) as database:
        await started(database, tmp_path, ONE)
        async with database.committing("be changed") as db:
            await db.execute("UPDATE holdfast_cluster.credentials SET keys = '[{}]'")
        with pytest.raises(StateCorrupted, match=r"holdfast_cluster\.credentials"):
            await started(database, tmp_path, ONE)
