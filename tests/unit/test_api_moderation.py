"""Bans and mutes over REST: by members with the role, and by operators."""

from __future__ import annotations

from api_rig import error_of, serving


async def test_admin_of_a_chat_bans_and_lifts_the_ban() -> None:
    async with serving() as rest:
        chat = await rest.chat("alice", ["bob", "carl"])
        bans, alice = f"/v1/chats/{chat}/bans", rest.token("alice")
        made = [
            await rest.ask("POST", bans, alice, {"user_id": "bob"}, Idempotency_Key="b")
            for _ in range(2)
        ]
        assert [answer.status_code for answer in made] == [200, 200] and made[0].json() == made[
            1
        ].json()
        assert made[1].headers["Idempotency-Replayed"] == "true"
        found = (await rest.ask("GET", bans, alice)).json()["bans"]
        assert [(ban["user_id"], ban["banned_by"]) for ban in found] == [("bob", "alice")]
        assert error_of(await rest.ask("GET", bans, rest.token("carl"))) == (403, "FORBIDDEN")
        assert error_of(await rest.ask("GET", bans, rest.token("bob"))) == (403, "NOT_A_MEMBER")
        assert error_of(await rest.send(chat, "hi", "k", rest.token("bob"))) == (
            403,
            "NOT_A_MEMBER",
        )
        adding = await rest.ask("POST", f"/v1/chats/{chat}/members", alice, {"user_id": "bob"})
        assert (
            error_of(adding) == (403, "FORBIDDEN") and "banned" in adding.json()["error"]["message"]
        )
        assert (await rest.ask("DELETE", f"{bans}/bob", alice)).status_code == 200
        assert error_of(await rest.ask("DELETE", f"{bans}/bob", alice)) == (404, "NOT_FOUND")
        assert (
            await rest.ask("POST", f"/v1/chats/{chat}/members", alice, {"user_id": "bob"})
        ).status_code == 200


async def test_member_is_muted_and_sends_again_after_that_is_lifted() -> None:
    async with serving() as rest:
        chat = await rest.chat("alice", ["bob"])
        mutes, alice, bob = f"/v1/chats/{chat}/mutes", rest.token("alice"), rest.token("bob")
        assert (await rest.ask("POST", mutes, alice, {"user_id": "bob"})).status_code == 200
        refused = await rest.send(chat, "hi", "k", bob)
        assert (
            error_of(refused) == (403, "FORBIDDEN") and refused.json()["error"]["details"]["muted"]
        )
        members = (await rest.ask("GET", f"/v1/chats/{chat}/members", bob)).json()["members"]
        assert {member["user_id"]: member["muted"] for member in members} == {
            "alice": False,
            "bob": True,
        }
        assert error_of(await rest.ask("DELETE", f"{mutes}/bob", bob)) == (403, "FORBIDDEN")
        assert (await rest.ask("DELETE", f"{mutes}/bob", alice)).status_code == 200
        assert (await rest.send(chat, "hi", "k", bob)).status_code == 201
        assert error_of(await rest.ask("POST", mutes, bob, {"user_id": "alice"})) == (
            403,
            "FORBIDDEN",
        )


async def test_muted_member_who_leaves_and_comes_back_is_still_muted() -> None:
    async with serving() as rest:
        chat, key = await rest.chat("alice", ["bob"]), rest.admin_key()
        alice, bob, bans = rest.token("alice"), rest.token("bob"), f"/v1/chats/{chat}/bans"
        body = {"user_id": "bob", "reason": "spam"}
        assert (await rest.ask("POST", f"/admin/chats/{chat}/mute", key, body)).status_code == 200
        assert (await rest.ask("DELETE", f"/v1/chats/{chat}/members/bob", bob)).status_code == 200
        assert (await rest.ask("GET", bans, alice)).json()["mutes"] == [
            {"user_id": "bob", "by_operator": True}
        ]
        added = (
            await rest.ask("POST", f"/v1/chats/{chat}/members", alice, {"user_id": "bob"})
        ).json()
        assert '"muted":true' in added["event"]["content"]
        assert error_of(await rest.send(chat, "hi", "k", bob)) == (403, "FORBIDDEN")
        assert (await rest.ask("POST", f"/admin/chats/{chat}/unmute", key, body)).status_code == 200
        assert (await rest.send(chat, "hi", "k", bob)).status_code == 201


async def test_members_read_that_an_operator_acted_and_no_keys_id() -> None:
    async with serving() as rest:
        chat, key = await rest.chat("alice", ["bob", "carl"]), rest.admin_key()
        for verb, user_id in (
            ("mute", "bob"),
            ("unmute", "bob"),
            ("ban", "carl"),
            ("ban", "eve"),
            ("unban", "eve"),
        ):
            body = {"user_id": user_id, "reason": "spam"}
            assert (
                await rest.ask("POST", f"/admin/chats/{chat}/{verb}", key, body)
            ).status_code == 200
        for path in ("", "/messages", "/members", "/bans"):
            answer = await rest.ask("GET", f"/v1/chats/{chat}{path}", rest.token("alice"))
            assert answer.status_code == 200 and "key_" not in answer.text
            assert ("an operator" in answer.text) is (path in ("/messages", "/bans"))
        assert all(
            record.actor.startswith("key_") for record in (await rest.store.audit(None, 10)).records
        )


async def test_direct_chat_is_declined_by_muting_the_other() -> None:
    async with serving() as rest:
        body = {"kind": "direct", "members": ["bob"]}
        chat = (await rest.ask("POST", "/v1/chats", rest.token("eve"), body)).json()["chat"][
            "chat_id"
        ]
        muted = await rest.ask(
            "POST", f"/v1/chats/{chat}/mutes", rest.token("bob"), {"user_id": "eve"}
        )
        assert muted.status_code == 200
        assert error_of(await rest.send(chat, "hi", "k", rest.token("eve"))) == (403, "FORBIDDEN")
        assert (await rest.send(chat, "no", "k", rest.token("bob"))).status_code == 201


async def test_operator_restricts_anybody_but_an_owner_and_it_is_recorded() -> None:
    async with serving() as rest:
        chat, key = await rest.chat("alice", ["bob"]), rest.admin_key()
        for verb in ("mute", "unmute", "ban", "unban"):
            body = {"user_id": "bob", "reason": f"to {verb}"}
            answer = await rest.ask("POST", f"/admin/chats/{chat}/{verb}", key, body)
            assert answer.status_code == 200, answer.text
            if verb == "ban":
                found = (await rest.ask("GET", f"/admin/chats/{chat}/bans", key)).json()["bans"]
                assert [ban["user_id"] for ban in found] == ["bob"]
        records = [(r.action, r.reason) for r in (await rest.store.audit(None, 10)).records]
        assert records == [
            (f"member.{verb}", f"to {verb}") for verb in ("mute", "unmute", "ban", "unban")
        ]
        for verb in ("mute", "ban"):
            body = {"user_id": "alice", "reason": "no"}
            answer = await rest.ask("POST", f"/admin/chats/{chat}/{verb}", key, body)
            assert (
                error_of(answer) == (403, "FORBIDDEN")
                and "owner" in answer.json()["error"]["message"]
            )
        unknown = await rest.ask(
            "POST", "/admin/chats/chat_none/ban", key, {"user_id": "bob", "reason": "no"}
        )
        assert error_of(unknown) == (404, "NOT_FOUND")
        assert error_of(await rest.ask("GET", "/admin/chats/chat_none/bans", key)) == (
            404,
            "NOT_FOUND",
        )
        assert len((await rest.store.audit(None, 10)).records) == 4, "what was refused is no act"
