"""Settings decide over REST too: no schema caps what an operator has allowed."""

from __future__ import annotations

from api_rig import AT, SECRET, error_of, serving

from holdfast.access.tokens import Tokens, TokenSettings, shared_secret
from holdfast.clock import ManualClock
from holdfast.message import Draft, User
from holdfast.session.settings import PageSettings
from holdfast.store.memory import MemoryStore
from holdfast.store.plan import ChatSettings

YEAR = 365 * 86400


async def test_a_token_lives_as_long_as_the_setting_allows() -> None:
    tokens = Tokens(
        TokenSettings(ttl_seconds_max=YEAR), shared_secret(SECRET), ManualClock(1_700_000_000)
    )

    async with serving(tokens=tokens) as rest:
        for ttl, status in ((YEAR, 201), (YEAR + 1, 400)):
            body = {"user_id": "alice", "ttl_seconds": ttl}
            assert (
                await rest.ask("POST", "/v1/tokens", rest.tenant_key(), body)
            ).status_code == status


async def test_a_chat_is_as_large_and_its_name_as_long_as_the_settings_allow() -> None:
    limits = ChatSettings(members_max=2_000, members_at_creation_max=1_500, name_characters_max=300)

    async with serving(store=MemoryStore(limits)) as rest:
        alice, many = rest.token("alice"), [f"user{n}" for n in range(1_499)]
        made = await rest.ask("POST", "/v1/chats", alice, {"name": "n" * 300, "members": many})
        assert made.status_code == 201, made.text
        where = f"/v1/chats/{made.json()['chat']['chat_id']}"
        assert (await rest.ask("PATCH", where, alice, {"name": "m" * 300})).status_code == 200
        too_long = await rest.ask("PATCH", where, alice, {"name": "m" * 301})
        assert error_of(too_long) == (400, "INVALID_MESSAGE") and "300" in too_long.text
        too_many = await rest.ask(
            "POST", "/v1/chats", alice, {"name": "n", "members": [*many, "one", "two"]}
        )
        assert error_of(too_many) == (400, "INVALID_MESSAGE")
        assert too_many.json()["error"]["details"] == {"field": "members", "limit": 1500}


async def test_a_page_has_as_many_messages_as_the_settings_allow_and_as_the_sockets_give() -> None:
    async with serving(pages=PageSettings(default_messages=2, max_messages=4)) as rest:
        chat = await rest.chat()
        for n in range(6):
            await rest.send(chat, "x", f"k{n}")

        async def page(query: str) -> list[int]:
            answer = await rest.ask("GET", f"/v1/chats/{chat}/messages{query}", rest.token("alice"))
            return [message["sequence"] for message in answer.json()["messages"]]

        assert await page("?after=0") == [1, 2]
        assert await page("?after=0&limit=4") == [1, 2, 3, 4]
        assert await page("?after=0&limit=5") == [1, 2, 3, 4]


async def test_more_than_the_usual_maximum_can_be_allowed() -> None:
    async with serving(pages=PageSettings(max_messages=1_000)) as rest:
        chat = await rest.chat()
        user = User("acme", "alice")
        await rest.store.append(
            [Draft(user, chat, f"k{n}", "x", "text/plain", f"msg_{n}", AT) for n in range(600)]
        )
        path = f"/v1/chats/{chat}/messages?after=0&limit=600"
        assert len((await rest.ask("GET", path, rest.token("alice"))).json()["messages"]) == 600
