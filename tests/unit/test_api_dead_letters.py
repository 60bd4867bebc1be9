"""Dead letters of fanout, by REST: what an operator sees, and what replay does."""

from __future__ import annotations

from collections.abc import Sequence

from api_rig import Rest, error_of, serving

from holdfast.fanout.dead_letters import DeadLetter

AT = "2026-01-01T00:00:00.000Z"
WHY = "looked at it"


async def put(rest: Rest, *chat_ids: str) -> None:
    for offset, chat_id in enumerate(chat_ids, 1):
        letter = DeadLetter(0, offset, "undecodable", "no JSON", b"\xff{}", AT, "acme", chat_id)
        await rest.deps.dead_letters.put(letter)


async def test_letters_are_listed_without_data_and_shown_with_it() -> None:
    async with serving() as rest:
        await put(rest, "chat_1", "chat_2", "")
        admin = rest.admin_key()
        page = (await rest.ask("GET", "/admin/dead-letters?limit=2", admin)).json()
        assert [letter["chat_id"] for letter in page["letters"]] == ["", "chat_2"]
        assert page["counts"] == {"undecodable": 3}
        assert {letter["data"] for letter in page["letters"]} == {None}
        more = f"/admin/dead-letters?before={page['next_before']}"
        [last] = (await rest.ask("GET", more, admin)).json()["letters"]
        shown = (await rest.ask("GET", f"/admin/dead-letters/{last['number']}", admin)).json()
        assert shown == {**last, "data": "\ufffd{}"}
        assert (last["cause"], last["shard"], last["offset"], last["at"]) == ("no JSON", 0, 1, AT)
        for number in ("4711", "x", "0"):
            answer = await rest.ask("GET", f"/admin/dead-letters/{number}", admin)
            assert error_of(answer) == (404, "NOT_FOUND")


async def test_replay_compares_the_chats_records_the_act_and_removes_the_letters() -> None:
    compared: list[Sequence[str]] = []
    async with serving(compare_chats=compared.append) as rest:
        await put(rest, "chat_1", "chat_1", "chat_2", "")
        admin, path = rest.admin_key(), "/admin/dead-letters/replay"
        body = {"numbers": [3, 1, 4711], "reason": WHY}
        assert (await rest.ask("POST", path, admin, body)).json() == {"count": 2}
        assert compared == [["chat_1", "chat_2"]]
        body = {"numbers": [2, 4], "reason": WHY}
        assert (await rest.ask("POST", path, admin, body)).json() == {"count": 2}
        assert compared[1:] == [[]], "a letter of an unknown chat: all are compared"
        assert not await rest.deps.dead_letters.read(10)
        assert error_of(await rest.ask("POST", path, admin, body)) == (404, "NOT_FOUND")
        records = (await rest.store.audit(None, 100)).records
        acts = [(record.action, record.target, record.reason) for record in records]
        assert acts == [
            ("dead_letters.replay", "1 3 4711", WHY),
            ("dead_letters.replay", "2 4", WHY),
        ]


async def test_discard_removes_and_compares_nothing() -> None:
    compared: list[Sequence[str]] = []
    async with serving(compare_chats=compared.append) as rest:
        await put(rest, "chat_1", "chat_2")
        body = {"numbers": [2], "reason": WHY}
        done = await rest.ask("POST", "/admin/dead-letters/discard", rest.admin_key(), body)
        assert done.json() == {"count": 1} and compared == []
        assert [letter.chat_id for letter in await rest.deps.dead_letters.read(10)] == ["chat_1"]
