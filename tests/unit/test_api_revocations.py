"""Cutting a user off over REST: what counts at once, what is recorded or refused."""

from __future__ import annotations

from typing import Any

import httpx
import jwt
import pytest
from api_rig import SECRET, Rest, error_of, serving

from holdfast.access.revocations.in_force import RevocationsInForce
from holdfast.access.revocations.memory import MemoryRevocations
from holdfast.clock import ManualClock
from holdfast.errors import Unavailable
from holdfast.message import User

PATH = "/admin/revocations"


async def revoke(rest: Rest, key: str, **body: Any) -> httpx.Response:
    return await rest.ask("POST", PATH, key, {"reason": "abuse", "tenant": "acme", **body})


async def status(rest: Rest, token: str) -> int:
    return (await rest.ask("GET", "/v1/chats", token)).status_code


async def test_revoked_token_is_refused_at_once_and_no_other_until_it_is_lifted() -> None:
    async with serving() as rest:
        key, first, second = rest.admin_key(), rest.token("alice"), rest.token("alice")
        made = await revoke(rest, key, kind="token", token=first)
        assert made.status_code == 201 and made.json()["user_id"] == "alice"
        refused = await rest.ask("GET", "/v1/chats", first)
        assert error_of(refused) == (401, "UNAUTHORIZED")
        assert refused.json()["error"]["details"] == {"revoked": "token"}
        assert await status(rest, second) == 200
        by_id = await revoke(rest, key, kind="token", jti=rest.deps.tokens.read(second).token_id)
        assert by_id.status_code == 201 and await status(rest, second) == 401
        lifted = await rest.ask("DELETE", f"{PATH}/{made.json()['number']}?reason=mistake", key)
        assert lifted.json() == made.json()
        assert (await status(rest, first), await status(rest, second)) == (200, 401)
        assert first not in str((await rest.store.audit(None, 10)).records), "a token is no record"


def signed(rest: Rest, issued_in: float, ttl_seconds: float = 30 * 86400) -> str:
    """A token of alice issued in ``issued_in`` seconds, by a sign-in's own clock."""
    iat = rest.clock.now() + issued_in
    claims = {"iss": "holdfast", "aud": "holdfast", "sub": "alice", "tenant": "acme", "iat": iat}
    return jwt.encode({**claims, "exp": iat + ttl_seconds}, SECRET, "HS256")


async def test_revoked_token_is_never_good_again_also_if_its_time_has_not_come() -> None:
    async with serving() as rest:
        key = rest.admin_key()
        tokens = [signed(rest, issued_in) for issued_in in (-86400, 0, 5, 3600, 90 * 86400)]
        for token in tokens:
            assert (await revoke(rest, key, kind="token", token=token)).status_code == 201
        for _ in range(26):
            rest.clock.advance(5 * 86400)
            assert [await status(rest, token) for token in tokens] == [401] * 5
            assert await status(rest, signed(rest, -1)) == 200


async def test_tokens_of_a_user_issued_until_now_are_refused_and_later_ones_are_not() -> None:
    async with serving() as rest:
        key, old, bob = rest.admin_key(), rest.token("alice"), rest.token("bob")
        rest.clock.advance(10.4)
        same_second = rest.token("alice")
        made = (await revoke(rest, key, kind="user", user_id="alice")).json()
        assert (made["issued_before"], made["ends_at"]) == (
            "2023-11-14T22:13:31.000Z",
            "2023-12-14T22:13:46.000Z",
        )
        assert [await status(rest, token) for token in (old, same_second, bob)] == [401, 401, 200]
        rest.clock.advance(1)
        assert await status(rest, rest.token("alice")) == 200
        rest.clock.advance(31 * 86400)
        assert (await rest.ask("GET", PATH, key)).json() == {"revocations": [], "next": None}


async def test_tokens_minted_with_a_leaked_tenant_key_end_with_those_of_the_tenant() -> None:
    async with serving() as rest:
        admin, leaked = rest.admin_key(), rest.tenant_key()
        body = {"user_id": "ceo", "ttl_seconds": 30 * 86400}
        stolen = (await rest.ask("POST", "/v1/tokens", leaked, body)).json()["token"]
        elsewhere = rest.token("ceo", tenant="other")
        made = await revoke(rest, admin, kind="tenant")
        assert made.status_code == 201
        assert made.json() == {
            "number": 1,
            "kind": "tenant",
            "tenant": "acme",
            "user_id": None,
            "device_id": None,
            "token_id": None,
            "issued_before": "2023-11-14T22:13:21.000Z",
            "made_at": "2023-11-14T22:13:20.000Z",
            "ends_at": "2023-12-14T22:13:36.000Z",
        }
        refused = await rest.ask("GET", "/v1/chats", stolen)
        assert error_of(refused) == (401, "UNAUTHORIZED")
        assert refused.json()["error"]["details"] == {"revoked": "tenant"}
        assert await status(rest, elsewhere) == 200
        rest.clock.advance(1)
        assert await status(rest, rest.token("ceo")) == 200, "those made afterwards are good"
        found = (await rest.ask("GET", f"{PATH}?kind=tenant&tenant=acme", admin)).json()[
            "revocations"
        ]
        assert found == [made.json()]
        assert (await rest.ask("DELETE", f"{PATH}/1?reason=mistake", admin)).status_code == 200
        assert await status(rest, stolen) == 200
        records = [(r.action, r.target) for r in (await rest.store.audit(None, 10)).records]
        assert records == [("tenant.revoke", "acme"), ("revocation.lift", "acme")]


async def test_moment_can_be_given_and_must_be_one() -> None:
    async with serving() as rest:
        key, old = rest.admin_key(), rest.token("alice")
        rest.clock.advance(600)
        new = rest.token("alice")
        made = await revoke(
            rest, key, kind="user", user_id="alice", issued_before="2023-11-14T22:14:00+00:00"
        )
        assert made.status_code == 201
        assert (await status(rest, old), await status(rest, new)) == (401, 200)
        for bad in ("yesterday", "2023-11-14T22:14:00", "2023-11-14T22:30:00Z", "", "0"):
            answer = await revoke(rest, key, kind="user", user_id="bob", issued_before=bad)
            assert error_of(answer) == (400, "INVALID_MESSAGE"), bad
        assert len((await rest.ask("GET", PATH, key)).json()["revocations"]) == 1


async def test_banned_user_is_refused_and_a_muted_one_reads_and_cannot_send() -> None:
    async with serving() as rest:
        key, chat = rest.admin_key(), await rest.chat("alice", ["bob"])
        ban = (await revoke(rest, key, kind="ban", user_id="alice")).json()
        rest.clock.advance(5)
        assert await status(rest, rest.token("alice")) == 401 and ban["ends_at"] is None
        mute = (await revoke(rest, key, kind="mute", user_id="bob")).json()
        bob = rest.token("bob")
        refused = await rest.send(chat, "hi", "k", bob)
        assert (
            error_of(refused) == (403, "FORBIDDEN") and refused.json()["error"]["details"]["muted"]
        )
        assert await status(rest, bob) == 200
        acting = {"Idempotency_Key": "k2", "X_Act_As": "bob"}
        sending = await rest.ask(
            "POST", f"/v1/chats/{chat}/messages", rest.tenant_key(), {"content": "x"}, **acting
        )
        assert error_of(sending) == (403, "FORBIDDEN"), (
            "a backend does not send for a muted user either"
        )
        for number in (ban["number"], mute["number"]):
            assert (
                await rest.ask("DELETE", f"{PATH}/{number}?reason=over", key)
            ).status_code == 200
        assert await status(rest, rest.token("alice")) == 200
        assert (await rest.send(chat, "hi", "k", bob)).status_code == 201


async def test_user_muted_in_the_tenant_cannot_rename_chats_or_send_by_a_backend() -> None:
    async with serving() as rest:
        chat = await rest.chat("alice", ["bob"])
        mute = (await revoke(rest, rest.admin_key(), kind="mute", user_id="alice")).json()
        speech = (
            ("PATCH", f"/v1/chats/{chat}", {"name": "SHOUTING"}),
            ("POST", "/v1/chats", {"kind": "group", "name": "SHOUTING", "members": ["bob"]}),
            ("POST", f"/v1/chats/{chat}/members", {"user_id": "SHOUTING"}),
            ("POST", f"/v1/chats/{chat}/messages", {"content": "SHOUTING"}),
        )
        for n, (method, path, body) in enumerate(speech):
            for who, acting in (
                (rest.token("alice"), {}),
                (rest.tenant_key(), {"X_Act_As": "alice"}),
            ):
                keyed = {"Idempotency_Key": f"k{n}"} if method == "POST" else {}
                answer = await rest.ask(method, path, who, body, **keyed, **acting)
                assert error_of(answer) == (403, "FORBIDDEN"), path
                error = answer.json()["error"]
                assert error["details"]["muted"] and "muted in the tenant acme" in error["message"]
        await rest.ask("DELETE", f"{PATH}/{mute['number']}?reason=over", rest.admin_key())
        for n, (method, path, body) in enumerate(speech):
            keyed = {"Idempotency_Key": f"later{n}"} if method == "POST" else {}
            answer = await rest.ask(method, path, rest.token("alice"), body, **keyed)
            assert answer.status_code in (200, 201), path


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kind": "token"}, "token"),
        ({"kind": "token", "token": "x", "jti": "y"}, "token"),
        ({"kind": "token", "token": "not.a.token"}, "token"),
        ({"kind": "token", "jti": "y", "user_id": "alice"}, "user_id"),
        ({"kind": "user"}, "user_id"),
        ({"kind": "user", "user_id": "alice", "device_id": "phone"}, "device_id"),
        ({"kind": "device", "user_id": "alice"}, "device_id"),
        ({"kind": "tenant", "user_id": "alice"}, "user_id"),
        ({"kind": "tenant", "tenant": None}, "tenant"),
        ({"kind": "tenant", "issued_before": "yesterday"}, "issued_before"),
        (
            {"kind": "ban", "user_id": "alice", "issued_before": "2023-11-14T22:14:00Z"},
            "issued_before",
        ),
        ({"kind": "mute", "user_id": "a b"}, "user_id"),
        ({"kind": "exile", "user_id": "alice"}, "kind"),
    ],
)
async def test_wrong_fields_are_named_and_nothing_changes(body: dict[str, Any], field: str) -> None:
    async with serving() as rest:
        answer = await revoke(rest, rest.admin_key(), **body)
        assert error_of(answer) == (400, "INVALID_MESSAGE"), answer.text
        assert field in answer.text
        assert len(rest.deps.revocations) == 0 and not (await rest.store.audit(None, 10)).records


async def test_token_that_is_refused_anyway_is_not_revoked() -> None:
    async with serving() as rest:
        key, token, foreign = (
            rest.admin_key(),
            rest.token("alice", ttl_seconds=60),
            rest.token("alice", "other"),
        )
        assert error_of(await revoke(rest, key, kind="token", token=foreign)) == (
            400,
            "INVALID_MESSAGE",
        )
        rest.clock.advance(70)
        answer = await revoke(rest, key, kind="token", token=token)
        assert (
            error_of(answer) == (400, "INVALID_MESSAGE")
            and "expired" in answer.json()["error"]["message"]
        )
        assert token not in answer.text and not (await rest.store.audit(None, 10)).records


async def test_what_does_not_exist_cannot_be_lifted_and_leaves_no_record() -> None:
    async with serving() as rest:
        for number in ("1", "x", "-1", "01"):
            answer = await rest.ask("DELETE", f"{PATH}/{number}?reason=r", rest.admin_key())
            assert error_of(answer) == (404, "NOT_FOUND")
        assert not (await rest.store.audit(None, 10)).records


async def test_every_act_is_recorded_before_it_is_done() -> None:
    async with serving() as rest:
        key = rest.admin_key()
        for body in (
            {"kind": "device", "user_id": "alice", "device_id": "phone"},
            {"kind": "ban", "user_id": "bob"},
        ):
            await revoke(rest, key, **body)
        await rest.ask("DELETE", f"{PATH}/2?reason=over", key)
        rest.online[User("acme", "alice")] = "now"
        body = {"tenant": "acme", "user_id": "alice", "device_id": "phone", "reason": "look"}
        assert (await rest.ask("POST", "/admin/disconnect", key, body)).json() == {"closed": 1}
        assert (
            await rest.ask("POST", "/admin/disconnect", key, {**body, "user_id": "eve"})
        ).json() == {"closed": 0}
        records = [(r.action, r.target) for r in (await rest.store.audit(None, 10)).records]
        assert records == [
            ("device.revoke", "acme/alice/phone"),
            ("user.ban", "acme/bob"),
            ("revocation.lift", "acme/bob"),
            ("user.disconnect", "acme/alice/phone"),
            ("user.disconnect", "acme/eve/phone"),
        ]

        async def unrecorded(*given: Any) -> None:
            raise Unavailable("the disk is full")

        rest.store.record = unrecorded  # type: ignore[method-assign]
        assert error_of(await revoke(rest, key, kind="ban", user_id="carl"))[0] == 503
        assert await status(rest, rest.token("carl")) == 200, "without a record it is not done"


async def test_repetition_under_one_key_is_answered_alike_and_done_once() -> None:
    async with serving() as rest:
        key, body = (
            rest.admin_key(),
            {"reason": "abuse", "tenant": "acme", "kind": "ban", "user_id": "bob"},
        )
        first = await rest.ask("POST", PATH, key, body, Idempotency_Key="k")
        await rest.ask("DELETE", f"{PATH}/{first.json()['number']}?reason=over", key)
        again = await rest.ask("POST", PATH, key, body, Idempotency_Key="k")
        assert again.json() == first.json() and again.headers["Idempotency-Replayed"] == "true"
        assert len(rest.deps.revocations) == 0
        other = await rest.ask("POST", PATH, key, {**body, "user_id": "eve"}, Idempotency_Key="k")
        assert error_of(other) == (409, "IDEMPOTENCY_KEY_REUSED")


async def test_list_comes_in_pages_and_can_be_narrowed() -> None:
    async with serving() as rest:
        key = rest.admin_key()
        for n in range(5):
            await revoke(rest, key, kind="ban" if n % 2 else "mute", user_id=f"u{n}")
        page = (await rest.ask("GET", f"{PATH}?limit=2", key)).json()
        assert ([e["user_id"] for e in page["revocations"]], page["next"]) == (["u0", "u1"], 2)
        page = (await rest.ask("GET", f"{PATH}?limit=3&after=2", key)).json()
        assert ([e["user_id"] for e in page["revocations"]], page["next"]) == (
            ["u2", "u3", "u4"],
            None,
        )
        found = (await rest.ask("GET", f"{PATH}?kind=ban&tenant=acme", key)).json()["revocations"]
        assert [e["user_id"] for e in found] == ["u1", "u3"]
        found = (await rest.ask("GET", f"{PATH}?user_id=u3&tenant=other", key)).json()[
            "revocations"
        ]
        assert found == []


async def test_only_a_key_with_the_scope_may() -> None:
    async with serving() as rest:
        body = {"kind": "ban", "user_id": "bob"}
        assert error_of(await revoke(rest, rest.admin_key("keys:write"), **body)) == (
            403,
            "FORBIDDEN",
        )
        assert error_of(await revoke(rest, rest.tenant_key(), **body)) == (403, "FORBIDDEN")
        assert error_of(await revoke(rest, rest.token("alice"), **body)) == (403, "FORBIDDEN")
        assert (await revoke(rest, rest.admin_key("access:write"), **body)).status_code == 201


async def test_full_list_refuses_the_next_entry_without_a_record() -> None:
    clock = ManualClock(1_700_000_000)
    held = RevocationsInForce(MemoryRevocations(clock, entries_max=2), clock)

    async with serving(revocations=held) as rest:
        key = rest.admin_key()
        for name in ("a", "b", "a"):
            assert (await revoke(rest, key, kind="ban", user_id=name)).status_code == 201
        answer = await revoke(rest, key, kind="ban", user_id="c")
        assert (
            error_of(answer) == (403, "FORBIDDEN")
            and "lift some first" in answer.json()["error"]["message"]
        )
        assert len((await rest.store.audit(None, 10)).records) == 3


async def test_erased_user_keeps_no_device_and_no_token_among_the_entries() -> None:
    async with serving() as rest:
        key, token, ahead = rest.admin_key(), rest.token("alice"), signed(rest, 5)
        for one in (token, ahead):
            await revoke(rest, key, kind="token", token=one)
        await revoke(rest, key, kind="device", user_id="alice", device_id="alices-phone")
        await revoke(rest, key, kind="ban", user_id="alice")
        erase = {"tenant": "acme", "user_id": "alice", "reason": "asked"}
        assert (await rest.ask("POST", "/admin/erase", key, erase)).json()["done"]
        left = (await rest.ask("GET", PATH, key)).json()["revocations"]
        assert sorted(entry["kind"] for entry in left) == [
            "ban",
            "user",
        ] and "alices-phone" not in str(left)
        assert (await rest.ask("DELETE", f"{PATH}/4?reason=over", key)).status_code == 200
        assert [await status(rest, one) for one in (token, ahead)] == [401, 401], (
            "what was revoked stays so"
        )
