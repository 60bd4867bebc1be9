"""Erasing a person over REST: everything they wrote, in steps that can be cut off
anywhere and asked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from api_rig import Rest, error_of, serving

from holdfast.api.deps import ApiSettings
from holdfast.errors import Unavailable
from holdfast.message import User, Watermark
from holdfast.store.commands import Command, CommandResult, Erase, HaltChat
from holdfast.store.memory import MemoryStore
from holdfast.verify.checkers.stored import acked_is_stored
from holdfast.verify.history import ClientSeen, Ok, Recorder, Sighting, digest
from proof.end_state import note_store

BODY = {"tenant": "acme", "user_id": "alice", "reason": "ticket 4711"}


async def erase(rest: Rest, **changed: Any) -> dict[str, Any]:
    answer = await rest.ask("POST", "/admin/erase", rest.admin_key(), {**BODY, **changed})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def contents(rest: Rest, chat: str) -> list[str]:
    return [
        m.content
        for m in (await rest.store.read_after(chat, 0, 100, 1 << 20)).messages
        if m.kind == "text"
    ]


async def members(rest: Rest, chat: str) -> dict[str, str]:
    return {m.user_id: m.role for m in await rest.store.members(chat)}


async def test_everything_a_user_wrote_goes_also_in_chats_they_have_left() -> None:
    async with serving() as rest:
        left, now = await rest.chat("bob", ["alice"]), await rest.chat("bob", ["alice"])
        await rest.send(left, "secret one", "k1")
        await rest.send(now, "secret two", "k1")
        await rest.send(now, "bob's own", "b", rest.token("bob"))
        await rest.ask("DELETE", f"/v1/chats/{left}/members/alice", rest.token("alice"))
        await rest.store.mark([Watermark(User("acme", "alice"), "phone", now, 1, 1, 1)])
        done = await erase(rest)
        assert (done["messages"], done["chats_left"], done["kept"], done["done"]) == (
            2,
            1,
            [],
            True,
        )
        assert await contents(rest, left) == [""] and await contents(rest, now) == ["", "bob's own"]
        assert await members(rest, now) == {"bob": "owner"} and not await rest.store.watermarks(now)
        again = await erase(rest)
        assert (again["messages"], again["chats_left"], again["done"]) == (0, 0, True)
        records = [
            r
            for r in (await rest.store.audit(None, 50)).records
            if r.action in ("user.erase", "member.remove")
        ]
        assert {r.reason for r in records} == {"ticket 4711"} and records[0].target == "acme/alice"
        assert all(r.actor.startswith("key_") for r in records)


async def test_another_tenants_user_of_the_same_name_is_left_alone() -> None:
    async with serving() as rest:
        chat = await rest.chat("alice", tenant="other")
        await rest.send(chat, "mine", "k", rest.token("alice", "other"))
        assert (await erase(rest))["messages"] == 0
        assert await contents(rest, chat) == ["mine"] and await members(rest, chat) == {
            "alice": "owner"
        }


async def test_a_chat_whose_last_owner_is_erased_goes_to_the_next_in_line() -> None:
    async with serving() as rest:
        chat, alone = await rest.chat("alice", ["bob", "carol"]), await rest.chat("alice")
        await rest.ask(
            "PATCH", f"/v1/chats/{chat}/members/carol", rest.token("alice"), {"role": "admin"}
        )
        await erase(rest)
        assert await members(rest, chat) == {"bob": "member", "carol": "owner"}
        assert await members(rest, alone) == {}


async def test_a_direct_chat_keeps_its_two_members_and_loses_the_words_of_one() -> None:
    async with serving() as rest:
        body = {"kind": "direct", "members": ["bob"]}
        chat = (await rest.ask("POST", "/v1/chats", rest.token("alice"), body)).json()["chat"][
            "chat_id"
        ]
        await rest.send(chat, "secret", "k")
        await rest.send(chat, "from bob", "k", rest.token("bob"))
        done = await erase(rest)
        assert (
            done["kept"] == [chat]
            and done["done"]
            and await contents(rest, chat) == ["", "from bob"]
        )
        assert set(await members(rest, chat)) == {"alice", "bob"}


async def test_a_halted_chat_loses_its_words_now_and_its_member_when_it_is_recovered() -> None:
    async with serving() as rest:
        chat, admin = await rest.chat("bob", ["alice"]), rest.admin_key()
        await rest.send(chat, "secret", "k")
        await rest.ask("POST", f"/admin/chats/{chat}/halt", admin, {"reason": "x"})
        done = await erase(rest)
        assert done["kept"] == [chat] and await contents(rest, chat) == [""]
        await rest.ask("POST", f"/admin/chats/{chat}/recover", admin, {"reason": "x"})
        assert (await erase(rest))["kept"] == [] and await members(rest, chat) == {"bob": "owner"}


class Interrupted(MemoryStore):
    """A store that is unavailable at some of the changes."""

    def __init__(self, fail_at: Sequence[int]) -> None:
        super().__init__()
        self._fail_at, self._steps = set(fail_at), 0

    async def change(self, command: Command) -> CommandResult:
        if not isinstance(command, HaltChat) and command.act.operator:
            self._steps += 1
            if self._steps in self._fail_at:
                raise Unavailable("unavailable")
        return await super().change(command)


async def test_an_erasure_that_is_cut_off_anywhere_is_completed_by_asking_again() -> None:
    async with serving(store=Interrupted([2, 5, 7])) as rest:
        chats = [await rest.chat("bob", ["alice"]) for _ in range(3)]
        for chat in chats:
            await rest.send(chat, "secret", "k")
        for _ in range(3):
            refused = await rest.ask("POST", "/admin/erase", rest.admin_key(), BODY)
            assert error_of(refused) == (503, "SERVICE_UNAVAILABLE")
        done = await erase(rest)
        assert done["done"] and [await contents(rest, chat) for chat in chats] == [[""]] * 3
        assert [await members(rest, chat) for chat in chats] == [{"bob": "owner"}] * 3


class Slow(MemoryStore):
    """Every erasure takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self.clock: Any = None

    async def change(self, command: Command) -> CommandResult:
        if isinstance(command, Erase):
            self.clock.advance(1)
        return await super().change(command)


async def test_an_erasure_ends_in_time_and_says_where_to_go_on() -> None:
    store = Slow()

    async with serving(ApiSettings(request_seconds_max=5), store=store) as rest:
        store.clock = rest.clock
        chats = [await rest.chat("bob", ["alice"]) for _ in range(7)]
        for chat in chats:
            await rest.send(chat, "secret", "k")
        steps, after, done = [], None, False
        while not done:
            answer = await erase(rest, after=after)
            steps.append(answer["messages"])
            after, done = answer["next"], answer["done"]
        assert sum(steps) == 7 and max(steps) == 3 and len(steps) >= 3


@pytest.mark.parametrize("after", ["texts.99", "audit.1", "0.chat_a", "x", -1, 2**53])
async def test_erasure_after_an_unknown_token_changes_nothing(after: str | int) -> None:
    async with serving() as rest:
        chat = await rest.chat("bob", ["alice"])
        await rest.send(chat, "secret", "k")
        body = {**BODY, "after": after}
        refused = await rest.ask("POST", "/admin/erase", rest.admin_key(), body)
        assert error_of(refused) == (400, "INVALID_MESSAGE")
        assert await contents(rest, chat) == ["secret"]
        assert set(await members(rest, chat)) == {"bob", "alice"}
        assert not (await rest.store.audit(None, 10)).records
        assert (await erase(rest, after=0))["done"], "a number is understood"


async def test_what_was_erased_counts_as_redacted_by_a_recorded_act() -> None:
    """Checker 1: an acknowledged message is stored unchanged, or redacted on record."""

    async with serving() as rest:
        chat = await rest.chat("bob", ["alice"])
        for n in range(3):
            await rest.send(chat, f"secret {n}", f"k{n}")
        await erase(rest)
        recorder = Recorder()
        recorder.note(ClientSeen(client="a", user_id="alice", tenant="acme", device_id="d"))
        for n in range(3):
            stored = (await rest.store.read_after(chat, n, 1, 1 << 20)).messages[0]
            op = recorder.invoke(
                0, "a", "send", chat, key=f"k{n}", digest=digest(f"secret {n}", "text/plain")
            )
            recorder.note(Ok(op=op, acked=Sighting(stored.sequence, stored.message_id)))
        await note_store(recorder, rest.store, rest.store, {chat: ["bob", "alice"]})
        assert list(recorder.history().chats[chat].redacted) == [1, 2, 3]
        assert acked_is_stored(recorder.history()).ok


class Waiting(MemoryStore):
    """Its search for texts waits until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def texts_of(self, *given: Any) -> Any:
        self.asked.set()
        await self.go_on.wait()
        return await super().texts_of(*given)


async def test_one_request_at_a_time_erases_a_person() -> None:
    store = Waiting()
    async with serving(store=store) as rest:
        first = asyncio.create_task(erase(rest))
        await store.asked.wait()
        busy = await rest.ask("POST", "/admin/erase", rest.admin_key(), BODY)
        assert error_of(busy) == (503, "SERVER_BUSY")
        store.go_on.set()
        assert (await first)["done"] and (await erase(rest))["done"], "each lets it go"
