"""An Idempotency-Key on requests that are no commit: done once, answered alike."""

from __future__ import annotations

import asyncio

import pytest
from api_rig import AT, error_of, serving

from holdfast.api.deps import ApiSettings, Backup
from holdfast.api.routes import ENDPOINTS
from holdfast.errors import OutcomeUnknown, ServerBusy, Unavailable
from holdfast.store.commands import CommandContext
from holdfast.store.memory import MemoryStore

NEW_KEY = {"kind": "tenant", "tenant": "acme", "label": "backend", "reason": "test"}
NIGHTLY = {"reason": "nightly"}


class Backups:
    """Counts; raises what it is given, or waits for ``may_end``."""

    def __init__(self, *troubles: Exception) -> None:
        self.troubles, self.taken = list(troubles), 0
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()

    async def __call__(self) -> Backup:
        self.taken += 1
        self.begun.set()
        await self.may_end.wait()
        if self.troubles:
            raise self.troubles.pop(0)
        return Backup(f"backups/{self.taken}", 1, AT, [])


def test_every_post_takes_a_key_but_those_that_make_nothing_to_be_made_twice() -> None:
    without = {
        endpoint.path
        for endpoint in ENDPOINTS
        if endpoint.method == "POST" and endpoint.key == "none"
    }
    assert without == {
        "/v1/tokens",
        "/v1/limits/check",
        "/v1/limits/check-many",
        "/v1/limits/renew",
        "/v1/limits/release",
        "/v1/responses/{reply_id}/cancel",
    }


async def test_a_repetition_gets_the_first_answer_and_does_nothing() -> None:
    backups = Backups()

    async with serving(backup=backups) as rest:
        admin = rest.admin_key()
        first = await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        again = await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        assert first.status_code == again.status_code == 200 and first.json() == again.json()
        assert (
            "idempotency-replayed" not in first.headers
            and again.headers["idempotency-replayed"] == "true"
        )
        assert backups.taken == 1 and len((await rest.store.audit(None, 10)).records) == 1
        other = await rest.ask(
            "POST", "/admin/backup", admin, {"reason": "weekly"}, Idempotency_Key="b1"
        )
        assert error_of(other) == (409, "IDEMPOTENCY_KEY_REUSED")
        elsewhere = await rest.ask("POST", "/admin/keys", admin, NEW_KEY, Idempotency_Key="b1")
        assert error_of(elsewhere) == (409, "IDEMPOTENCY_KEY_REUSED")
        colleague = await rest.ask(
            "POST", "/admin/backup", rest.admin_key(), NIGHTLY, Idempotency_Key="b1"
        )
        assert colleague.json()["path"] == "backups/2", "a key belongs to who uses it"


async def test_a_key_issued_twice_under_one_key_is_one_and_its_secret_is_kept_nowhere() -> None:
    async with serving() as rest:
        admin = rest.admin_key()
        first = await rest.ask("POST", "/admin/keys", admin, NEW_KEY, Idempotency_Key="k1")
        again = await rest.ask("POST", "/admin/keys", admin, NEW_KEY, Idempotency_Key="k1")
        assert first.status_code == 201 and error_of(again) == (409, "IDEMPOTENCY_KEY_REUSED")
        assert again.json()["error"]["details"]["answer"] == {"key": first.json()["key"]}, (
            "so it can be revoked"
        )
        assert len(rest.deps.keys.list()) == 2
        secret = first.json()["secret"]
        assert secret not in again.text and secret not in repr(vars(rest.store))


@pytest.mark.parametrize(
    ("trouble", "runs"), [(Unavailable("no answer"), 2), (OutcomeUnknown("who knows"), 1)]
)
async def test_what_did_not_happen_may_come_again_and_what_nobody_knows_may_not(
    trouble: Exception, runs: int
) -> None:
    backups = Backups(trouble)

    async with serving(backup=backups) as rest:
        admin = rest.admin_key()
        assert (
            await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        ).status_code == 503
        again = await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        assert again.status_code == (200 if runs == 2 else 409)
        assert backups.taken == runs


async def test_a_repetition_while_the_first_still_runs_waits_for_it() -> None:
    backups = Backups()

    async with serving(backup=backups) as rest:
        backups.may_end.clear()
        admin = rest.admin_key()
        first = asyncio.create_task(
            rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        )
        await backups.begun.wait()
        meanwhile = await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        assert (
            error_of(meanwhile) == (503, ServerBusy.code)
            and meanwhile.headers["retry-after"] == "1"
        )
        backups.may_end.set()
        assert (await first).status_code == 200
        again = await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        assert again.json() == (await first).json() and backups.taken == 1


async def test_repetition_on_another_node_is_busy_while_the_first_runs() -> None:
    backups, store = Backups(), MemoryStore()

    async with serving(backup=backups, store=store) as here:
        elsewhere = serving(backup=backups, store=store, node_id="there", keys=here.deps.keys)
        async with elsewhere as there:
            backups.may_end.clear()
            admin = here.admin_key()
            first = asyncio.create_task(
                here.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
            )
            await backups.begun.wait()
            busy = await there.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
            assert error_of(busy) == (503, ServerBusy.code) and busy.headers["retry-after"] == "1"
            backups.may_end.set()
            assert (await first).status_code == 200
            again = await there.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
            assert again.json() == (await first).json() and backups.taken == 1


async def test_repetition_of_what_a_node_did_not_finish_is_refused_after_its_time() -> None:
    backups, store = Backups(), MemoryStore()

    async with serving(backup=backups, store=store) as here:
        elsewhere = serving(backup=backups, store=store, node_id="there", keys=here.deps.keys)
        async with elsewhere as there:
            backups.may_end.clear()
            admin = here.admin_key()
            first = asyncio.create_task(
                here.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
            )
            await backups.begun.wait()
            first.cancel()
            await asyncio.wait((first,))
            there.deps.clock.advance(here.deps.settings.request_seconds_max + 1)
            again = await there.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
            assert error_of(again) == (409, "IDEMPOTENCY_KEY_REUSED") and backups.taken == 1


class Slow(MemoryStore):
    """Takes keys when ``may_begin`` says so and gives them back when ``may_end`` does,
    whether or not anybody waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.may_begin, self.begun = asyncio.Event(), asyncio.Event()
        self.may_end, self.given_back = asyncio.Event(), asyncio.Event()

    async def begin(self, act: CommandContext, node: str, seconds: float) -> str | None:
        self.begun.set()
        return await asyncio.shield(asyncio.ensure_future(self._begin_later(act, node, seconds)))

    async def _begin_later(self, act: CommandContext, node: str, seconds: float) -> str | None:
        await self.may_begin.wait()
        return await super().begin(act, node, seconds)

    async def keep(self, act: CommandContext, answer: str | None) -> None:
        if answer is None:
            await self.may_end.wait()
        await super().keep(act, answer)
        if answer is None:
            self.given_back.set()


@pytest.mark.parametrize("gives_up", ["the server", "the client"])
async def test_key_claimed_too_late_is_released_and_blocks_others_until_then(
    gives_up: str,
) -> None:
    """The writer is busy for longer than the request or its client waits: no run."""
    backups, store = Backups(), Slow()

    async with serving(ApiSettings(request_seconds_max=0.3), store=store, backup=backups) as rest:
        admin = rest.admin_key()
        first = asyncio.create_task(
            rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        )
        await store.begun.wait()
        if gives_up == "the server":
            assert error_of(await first) == (503, Unavailable.code)
        else:
            first.cancel()
            await asyncio.wait((first,))
        for goes_on in (store.may_begin.set, store.may_end.set):
            meanwhile = await rest.ask(
                "POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1"
            )
            assert error_of(meanwhile) == (503, ServerBusy.code) and backups.taken == 0
            goes_on()
        await store.given_back.wait()
        again = await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        assert again.status_code == 200 and backups.taken == 1
        repeated = await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        assert repeated.json() == again.json() and backups.taken == 1


async def test_an_answer_that_came_too_late_is_kept() -> None:
    """The request that gave up had not claimed the key: it releases nothing."""
    backups, store = Backups(), Slow()

    async with serving(ApiSettings(request_seconds_max=0.3), store=store, backup=backups) as rest:
        admin = rest.admin_key()
        store.may_begin.set()
        store.may_end.set()
        first = await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        store.may_begin.clear()
        late = await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        assert error_of(late) == (503, Unavailable.code)
        store.may_begin.set()
        again = late
        while again.status_code == 503:
            await asyncio.sleep(0)
            again = await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        assert again.json() == first.json() and backups.taken == 1 and not store.given_back.is_set()


async def test_answer_that_cannot_be_stored_is_sent_and_the_work_is_not_repeated() -> None:
    backups = Backups()

    class Forgetful(MemoryStore):
        async def keep(self, act: CommandContext, answer: str | None) -> None:
            raise Unavailable("the disk is full")

    async with serving(store=Forgetful(), backup=backups) as rest:
        admin = rest.admin_key()
        assert (
            await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        ).status_code == 200
        again = await rest.ask("POST", "/admin/backup", admin, NIGHTLY, Idempotency_Key="b1")
        assert error_of(again) == (409, "IDEMPOTENCY_KEY_REUSED") and backups.taken == 1


async def test_retention_under_a_key_is_done_once_however_many_steps_it_took() -> None:
    async with serving() as rest:
        chat, admin = await rest.chat(), rest.admin_key()
        for n in range(3):
            await rest.send(chat, "x", f"k{n}")
        path, body = f"/admin/chats/{chat}/retain", {"first_sequence": 3, "reason": "old"}
        first = await rest.ask("POST", path, admin, body, Idempotency_Key="r1")
        again = await rest.ask("POST", path, admin, body, Idempotency_Key="r1")
        assert first.json() == again.json() and first.json()["chat"]["first_sequence"] == 3
        assert len((await rest.store.audit(None, 10)).records) == 1
