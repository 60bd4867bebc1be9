"""Chats and members over REST: what the answers say."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import pytest
from api_rig import error_of, serving

from holdfast.api.deps import PresenceView
from holdfast.errors import Unavailable
from holdfast.message import User, Watermark


@pytest.mark.covers("001 `chat_id`: a ULID with the prefix `chat_`")
async def test_a_chat_is_created_with_its_creator_as_owner_and_its_first_members() -> None:
    async with serving() as rest:
        chat = await rest.chat("alice", ["bob"])
        answer = await rest.ask("GET", f"/v1/chats/{chat}", rest.token("bob"))
        body = answer.json()
        assert chat.startswith("chat_")
        assert (body["role"], body["chat"]["name"], body["chat"]["head"]) == ("member", "Team", 0)
        assert {m["user_id"]: m["role"] for m in body["members"]} == {
            "alice": "owner",
            "bob": "member",
        }


async def test_a_chat_created_twice_under_one_key_is_one_chat() -> None:
    async with serving() as rest:

        async def create(name: str) -> httpx.Response:
            return await rest.ask(
                "POST", "/v1/chats", rest.token("alice"), {"name": name}, Idempotency_Key="c1"
            )

        first, again, other = await create("A"), await create("A"), await create("B")
        assert (first.status_code, again.status_code) == (201, 200)
        assert first.json() == again.json()
        assert error_of(other) == (409, "IDEMPOTENCY_KEY_REUSED")
        assert len((await rest.ask("GET", "/v1/chats", rest.token("alice"))).json()["chats"]) == 1


async def test_one_key_of_two_users_is_two_keys() -> None:
    async with serving() as rest:
        for user in ("alice", "bob"):
            answer = await rest.ask(
                "POST", "/v1/chats", rest.token(user), {"name": user}, Idempotency_Key="c1"
            )
            assert answer.status_code == 201 and answer.json()["chat"]["name"] == user


async def test_a_repeated_creation_says_that_it_is_one() -> None:
    async with serving() as rest:
        made = [
            await rest.ask(
                "POST", "/v1/chats", rest.token("alice"), {"name": "lobby"}, Idempotency_Key="c1"
            )
            for _ in range(2)
        ]
        assert [answer.status_code for answer in made] == [201, 200]
        assert [answer.headers.get("Idempotency-Replayed") for answer in made] == [None, "true"]
        assert made[0].json() == made[1].json()


async def test_repeated_keyed_change_gets_the_first_answer_and_changes_nothing() -> None:
    async with serving() as rest:
        chat = await rest.chat()
        path, who = f"/v1/chats/{chat}/members", rest.token("alice")
        first = await rest.ask("POST", path, who, {"user_id": "bob"}, Idempotency_Key="m1")
        await rest.ask("DELETE", path + "/bob", who)
        again = await rest.ask(
            "POST", path, who, {"role": "member", "user_id": "bob"}, Idempotency_Key="m1"
        )
        assert first.json() == again.json() and again.headers["Idempotency-Replayed"] == "true"
        members = (await rest.ask("GET", path, who)).json()["members"]
        assert [m["user_id"] for m in members] == ["alice"]
        other = await rest.ask("POST", path, who, {"user_id": "zoe"}, Idempotency_Key="m1")
        assert error_of(other) == (409, "IDEMPOTENCY_KEY_REUSED")


async def test_a_direct_chat_is_unique_per_pair_whoever_asks() -> None:
    async with serving() as rest:
        ids = set()
        for user, other, status in (
            ("alice", "bob", 201),
            ("bob", "alice", 200),
            ("alice", "bob", 200),
        ):
            body = {"kind": "direct", "members": [other]}
            answer = await rest.ask("POST", "/v1/chats", rest.token(user), body)
            assert answer.status_code == status
            ids.add(answer.json()["chat"]["chat_id"])
        assert len(ids) == 1
        other_tenant = rest.token("alice", "evil")
        answer = await rest.ask(
            "POST", "/v1/chats", other_tenant, {"kind": "direct", "members": ["bob"]}
        )
        assert answer.status_code == 201


async def test_the_list_shows_titles_unread_counts_and_the_last_message_newest_first() -> None:
    async with serving() as rest:
        old = await rest.chat("alice", ["bob"])
        body = {"kind": "direct", "members": ["bob"]}
        direct = (await rest.ask("POST", "/v1/chats", rest.token("alice"), body)).json()["chat"][
            "chat_id"
        ]
        for n in range(3):
            await rest.send(old, f"message {n}", f"k{n}")
        await rest.store.mark([Watermark(User("acme", "bob"), "phone", old, 1, 3, 1)])
        chats = (await rest.ask("GET", "/v1/chats", rest.token("bob"))).json()["chats"]
        assert [c["chat"]["chat_id"] for c in chats] == [old, direct]
        assert [c["title"] for c in chats] == ["Team", "alice"]
        assert [(c["unread"], c["unread_capped"]) for c in chats] == [(2, False), (0, False)]
        assert (
            chats[0]["last_message"]["content"] == "message 2" and chats[1]["last_message"] is None
        )


async def test_the_list_is_paged_without_loss_or_repetition() -> None:
    async with serving() as rest:
        made = [await rest.chat() for _ in range(5)]
        seen: list[str] = []
        after = ""
        while True:
            page = (await rest.ask("GET", f"/v1/chats?limit=2{after}", rest.token("alice"))).json()
            seen += [c["chat"]["chat_id"] for c in page["chats"]]
            if page["next"] is None:
                break
            after = f"&after={page['next']}"
        assert seen == made[::-1]


async def test_a_message_to_the_chat_where_a_page_ended_does_not_move_the_place() -> None:
    async with serving() as rest:
        made = [await rest.chat() for _ in range(4)]
        for number, chat in enumerate(made):
            await rest.send(chat, "hello", f"k{number}")
        first = (await rest.ask("GET", "/v1/chats?limit=2", rest.token("alice"))).json()
        await rest.send(made[2], "again", "k5")
        after = first["next"]
        rest_of = (
            await rest.ask("GET", f"/v1/chats?limit=2&after={after}", rest.token("alice"))
        ).json()
        pages = [[entry["chat"]["chat_id"] for entry in page["chats"]] for page in (first, rest_of)]
        assert pages == [[made[3], made[2]], [made[1], made[0]]]


@pytest.mark.parametrize(
    "after", ["chat_a", "x.chat_a", "-1.chat_a", "\u0663.chat_a", f"{2**53}.chat_a", ".", ""]
)
async def test_a_place_that_no_page_named_is_refused(after: str) -> None:
    async with serving() as rest:
        refused = await rest.ask("GET", f"/v1/chats?after={after}", rest.token("alice"))
        assert error_of(refused) == (400, "INVALID_MESSAGE")


async def test_another_tenants_chat_cannot_be_probed_as_a_cursor() -> None:
    async with serving() as rest:
        chat = await rest.chat()
        evil = rest.token("mallory", "evil")
        there = await rest.ask("GET", f"/v1/chats?after=0.{chat}", evil)
        nowhere = await rest.ask("GET", "/v1/chats?after=0.chat_none", evil)
        assert error_of(there) == error_of(nowhere) == (400, "INVALID_MESSAGE")
        same_tenant = await rest.ask("GET", f"/v1/chats?after=0.{chat}", rest.token("nora"))
        assert error_of(same_tenant) == (403, "NOT_A_MEMBER")


async def test_leaving_ends_reading_and_sending() -> None:
    async with serving() as rest:
        chat, bob = await rest.chat("alice", ["bob"]), rest.token("bob")
        await rest.send(chat, "before", "k1")
        assert (await rest.ask("DELETE", f"/v1/chats/{chat}/members/bob", bob)).status_code == 200
        for path in (
            "",
            "/messages",
            "/messages?after=0",
            "/messages?around=1",
            "/members",
            "/presence",
        ):
            assert error_of(await rest.ask("GET", f"/v1/chats/{chat}{path}", bob)) == (
                403,
                "NOT_A_MEMBER",
            )
        assert error_of(await rest.send(chat, "after", "k2", bob)) == (403, "NOT_A_MEMBER")


async def test_a_rename_and_a_new_role_are_events_in_the_chat() -> None:
    async with serving() as rest:
        chat, who = await rest.chat("alice", ["bob"]), rest.token("alice")
        renamed = await rest.ask("PATCH", f"/v1/chats/{chat}", who, {"name": "Crew"})
        assert renamed.json()["chat"]["name"] == "Crew" and renamed.json()["event"]["sequence"] == 1
        changed = await rest.ask("PATCH", f"/v1/chats/{chat}/members/bob", who, {"role": "admin"})
        assert changed.json()["event"]["sequence"] == 2
        page = (await rest.ask("GET", f"/v1/chats/{chat}/messages", who)).json()
        assert [m["kind"] for m in page["messages"]] == ["event", "event"]


async def test_a_user_id_with_a_slash_can_be_removed() -> None:
    async with serving() as rest:
        chat = await rest.chat("alice", ["org/bob"])
        answer = await rest.ask(
            "DELETE", f"/v1/chats/{chat}/members/org%2Fbob", rest.token("alice")
        )
        assert answer.status_code == 200


async def test_presence_covers_members_only() -> None:
    async with serving() as rest:
        chat = await rest.chat("alice", ["bob"])
        rest.online.update(
            {User("acme", name): "2026-01-01T00:00:00.000Z" for name in ("bob", "nora")}
        )
        rest.online[User("evil", "alice")] = "2026-01-01T00:00:00.000Z"
        body = (await rest.ask("GET", f"/v1/chats/{chat}/presence", rest.token("alice"))).json()
        assert [u["user_id"] for u in body["users"]] == ["bob"] and body["stale"] is False


async def test_presence_whose_source_is_down_is_stale_and_no_error() -> None:
    async def down(users: Sequence[User]) -> PresenceView:
        raise Unavailable("the registry is unavailable")

    async with serving(presence=down) as rest:
        chat = await rest.chat()
        answer = await rest.ask("GET", f"/v1/chats/{chat}/presence", rest.token("alice"))
        assert (answer.status_code, answer.json()) == (200, {"users": [], "stale": True})


async def test_a_backend_mints_tokens_of_its_own_tenant_only() -> None:
    async with serving() as rest:
        key = rest.tenant_key("acme")
        answer = await rest.ask("POST", "/v1/tokens", key, {"user_id": "zoe", "ttl_seconds": 60})
        assert answer.status_code == 201
        principal = rest.deps.tokens.verify(answer.json()["token"])
        assert (
            principal.user == User("acme", "zoe") and principal.expires_at == rest.clock.now() + 60
        )
        refused = await rest.ask("POST", "/v1/tokens", key, {"user_id": "zoe", "tenant": "evil"})
        assert error_of(refused) == (400, "INVALID_MESSAGE")


async def test_a_revoked_key_is_refused_at_the_next_request() -> None:
    async with serving() as rest:
        key = rest.tenant_key()
        assert (await rest.ask("GET", "/v1/chats", key, X_Act_As="alice")).status_code == 200
        await rest.deps.keys.revoke(rest.deps.keys.list()[0].key_id)
        assert error_of(await rest.ask("GET", "/v1/chats", key, X_Act_As="alice")) == (
            401,
            "UNAUTHORIZED",
        )
