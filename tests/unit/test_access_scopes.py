"""What a token may do, on every way in: each endpoint and frame, by scope and chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import pytest
from api_rig import Rest, error_of, serving
from gateway_rig import Bench, FakeSocket, bench, entries, settle
from session_driver import ANN, Talk

from holdfast.access.principal import USER_SCOPES, Principal, UserScope
from holdfast.access.tokens import CHATS_MAX, Tokens, TokenSettings, shared_secret
from holdfast.api.routes import ENDPOINTS
from holdfast.clock import Ids, ManualClock
from holdfast.errors import BadSetting, InvalidMessage, Unauthorized
from holdfast.message import User
from holdfast.session.scopes import FRAME_SCOPES
from holdfast.wire.frames import (
    Ack,
    AckBody,
    AnyClientFrame,
    Authenticate,
    AuthenticateBody,
    ChatBody,
    Error,
    HeartbeatAck,
    Read,
    ReadBody,
    Resume,
    ResumeBody,
    SendBody,
    SendMessage,
    SyncBody,
    SyncRequest,
    TypingStart,
    TypingStop,
)

READ, SEND, CREATE, MEMBERS = "chats:read", "chats:send", "chats:create", "chats:members"
SECRET = b"a secret of at least thirty-two bytes"


@dataclass(frozen=True)
class Row:
    """A request that is right, and the scopes it needs."""

    name: str
    method: str
    path: str
    needs: tuple[UserScope, ...]
    body: Any = None
    key: str | None = None


C = "/v1/chats/{chat}"
ROWS = [
    Row("create_chat", "POST", "/v1/chats", (CREATE,), {"name": "New", "members": ["bob"]}),
    Row("list_chats", "GET", "/v1/chats", (READ,)),
    Row("get_chat", "GET", C, (READ,)),
    Row("rename_chat", "PATCH", C, (MEMBERS,), {"name": "Other"}),
    Row("list_members", "GET", C + "/members", (READ,)),
    Row("add_member", "POST", C + "/members", (MEMBERS,), {"user_id": "zoe"}),
    Row("change_role", "PATCH", C + "/members/bob", (MEMBERS,), {"role": "admin"}),
    Row("remove_member", "DELETE", C + "/members/bob", (SEND, MEMBERS)),
    Row("remove_member", "DELETE", C + "/members/alice", (SEND,)),
    Row("list_bans", "GET", C + "/bans", (READ,)),
    Row("ban_user", "POST", C + "/bans", (MEMBERS,), {"user_id": "bob"}),
    Row("unban_user", "DELETE", C + "/bans/eve", (MEMBERS,)),
    Row("mute_member", "POST", C + "/mutes", (SEND,), {"user_id": "bob"}),
    Row("unmute_member", "DELETE", C + "/mutes/mia", (SEND,)),
    Row("get_presence", "GET", C + "/presence", (READ,)),
    Row("list_messages", "GET", C + "/messages", (READ,)),
    Row("send_message", "POST", C + "/messages", (SEND,), {"content": "hi"}, "k1"),
    Row("redact_message", "DELETE", C + "/messages/1", (SEND,)),
    Row("get_status", "GET", C + "/messages/1/status", (READ,)),
]
OF_NO_CHAT = {"create_chat", "list_chats"}
"""What a token for some chats may ask without naming one; the effect is below."""


def test_the_table_has_every_endpoint_that_users_ask() -> None:
    assert {row.name for row in ROWS} == {
        endpoint.name for endpoint in ENDPOINTS if endpoint.caller == "user"
    }
    assert {
        e.name for e in ENDPOINTS if e.caller == "user" and "{chat_id}" not in e.path
    } == OF_NO_CHAT


async def ask(
    rest: Rest, row: Row, chat: str, scopes: frozenset[UserScope], chats: Any = None
) -> Any:
    key = {"Idempotency_Key": row.key} if row.key else {}
    token = rest.token("alice", scopes=scopes, chats=chats)
    return await rest.ask(row.method, row.path.format(chat=chat), token, row.body, **key)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.name}-{row.path}" for row in ROWS])
async def test_an_endpoint_needs_its_scopes_and_no_other(row: Row) -> None:
    async with serving() as rest:
        chat = await rest.chat("alice", ["bob", "mia"])
        assert (await rest.send(chat, "one", "k0")).status_code == 201
        for act, user_id in (("bans", "eve"), ("mutes", "mia")):
            done = await rest.ask(
                "POST", f"/v1/chats/{chat}/{act}", rest.token("alice"), {"user_id": user_id}
            )
            assert done.status_code == 200
        if "members/alice" in row.path:
            path = f"/v1/chats/{chat}/members/bob"
            assert (
                await rest.ask("PATCH", path, rest.token("alice"), {"role": "owner"})
            ).status_code == 200
        before = await rest.store.chat(chat)
        for lacking in row.needs:
            answer = await ask(rest, row, chat, USER_SCOPES - {lacking})
            assert error_of(answer) == (403, "FORBIDDEN")
            error = answer.json()["error"]
            assert lacking in error["message"] and error["details"]["scope"] == lacking
        outside = await ask(rest, row, chat, USER_SCOPES, ["chat_other"])
        if row.name not in OF_NO_CHAT:
            assert (
                error_of(outside) == (403, "FORBIDDEN")
                and chat in outside.json()["error"]["message"]
            )
        assert await rest.store.chat(chat) == before, "nothing changed"
        allowed = await ask(
            rest, row, chat, frozenset(row.needs), None if row.name in OF_NO_CHAT else [chat]
        )
        assert allowed.status_code in (200, 201), allowed.text


async def test_a_token_that_is_good_for_some_chats_lists_them_alone_and_creates_none() -> None:
    async with serving() as rest:
        mine = [await rest.chat("alice") for _ in range(4)]
        token = rest.token("alice", chats=mine[:2])
        answer = await rest.ask("POST", "/v1/chats", token, {"name": "New"})
        assert (
            error_of(answer) == (403, "FORBIDDEN")
            and "claim chats" in answer.json()["error"]["message"]
        )
        first = (await rest.ask("GET", "/v1/chats?limit=1", token)).json()
        second = (await rest.ask("GET", f"/v1/chats?limit=1&after={first['next']}", token)).json()
        listed = [entry["chat"]["chat_id"] for page in (first, second) for entry in page["chats"]]
        assert listed == [mine[1], mine[0]] and second["next"] is None
        probe = await rest.ask("GET", f"/v1/chats?after=0.{mine[3]}", token)
        assert error_of(probe) == (403, "FORBIDDEN"), "it does not show when another chat was used"


async def test_a_backend_mints_what_it_names_and_safe_tokens_else() -> None:
    async with serving() as rest:
        chat, key = await rest.chat("alice"), rest.tenant_key()

        async def minted(**asked: Any) -> Principal:
            answer = await rest.ask("POST", "/v1/tokens", key, {"user_id": "alice", **asked})
            assert answer.status_code == 201, answer.text
            return rest.deps.tokens.verify(answer.json()["token"])

        assert (await minted()).scopes == {READ, SEND} and (await minted()).chats is None
        some = await minted(scopes=[READ, CREATE, READ], chats=[chat])
        assert (some.scopes, some.chats) == ({READ, CREATE}, {chat})
        assert (await minted(scopes=[])).scopes == frozenset() and (
            await minted(chats=[])
        ).chats == frozenset()
        for wrong in (
            {"scopes": ["chats:write"]},
            {"scopes": "chats:read"},
            {"scopes": ["replies:read"]},
            {"scopes": [1]},
            {"chats": "chat_a"},
            {"chats": ["a b"]},
            {"chats": [f"c{n}" for n in range(CHATS_MAX + 1)]},
            {"chats": ["x" * 64] * 100},
            {"chats": [f"{n:064}" for n in range(100)]},
        ):
            answer = await rest.ask("POST", "/v1/tokens", key, {"user_id": "alice", **wrong})
            duplicates = wrong.get("chats") == ["x" * 64] * 100
            assert duplicates or error_of(answer) == (400, "INVALID_MESSAGE"), wrong


def test_a_token_has_room_for_as_many_chats_as_it_may_name() -> None:
    clock = ManualClock(1_700_000_000)
    ids, tokens = Ids(clock), Tokens(TokenSettings(), shared_secret(SECRET), clock)
    chats = {ids.new("chat_") for _ in range(CHATS_MAX)}
    assert (
        tokens.verify(tokens.mint(User("t" * 64, "u" * 64), 60, USER_SCOPES, chats)).chats == chats
    )
    with pytest.raises(InvalidMessage, match="name fewer chats"):
        tokens.mint(User("acme", "alice"), 60, None, [f"{n:064}" for n in range(CHATS_MAX)])


async def test_a_tenant_keys_writing_includes_every_writing_scope_and_no_reading() -> None:
    async with serving() as rest:
        chat = await rest.chat("alice", ["bob"])
        for row in ROWS:
            key = {"Idempotency_Key": row.key} if row.key else {}
            writer = rest.tenant_key(scopes=["chats:write"])
            headers = {"X_Act_As": "alice", **key}
            answer = await rest.ask(
                row.method, row.path.format(chat=chat), writer, row.body, **headers
            )
            if READ in row.needs:
                assert (
                    error_of(answer) == (403, "FORBIDDEN") and "--scope chats:read" in answer.text
                )
            else:
                assert "scope" not in answer.text, row.name
        reader = rest.tenant_key(scopes=["chats:read"])
        answer = await rest.ask("POST", "/v1/chats", reader, {"name": "New"}, X_Act_As="alice")
        assert (
            "lacks the scope chats:create" in answer.text and "--scope chats:write" in answer.text
        )


# --- the claims
# --------------------------------------------------------------------------------------


def claimed(settings: TokenSettings, **claims: Any) -> Principal:
    import jwt

    clock = ManualClock(1_700_000_000)
    given = {
        "iss": "holdfast",
        "aud": "holdfast",
        "sub": "alice",
        "iat": 1_700_000_000,
        "exp": 1_700_000_060,
        **claims,
    }
    return Tokens(settings, shared_secret(SECRET), clock).verify(jwt.encode(given, SECRET, "HS256"))


def test_token_without_scopes_reads_and_sends_unless_the_operator_says_otherwise() -> None:
    assert claimed(TokenSettings()).scopes == {READ, SEND}
    assert claimed(TokenSettings(default_scopes=(READ,))).scopes == {READ}
    named = claimed(TokenSettings(scope_claim="may"), may=[CREATE], holdfast_scopes=7)
    assert named.scopes == {CREATE}
    for wrong in (
        {"default_scopes": ("chats:write",)},
        {"scope_claim": ""},
        {"scope_claim": "sub"},
    ):
        with pytest.raises(BadSetting, match="scope"):
            TokenSettings(**wrong)


@pytest.mark.parametrize(
    ("claim", "value", "named"),
    [
        ("holdfast_scopes", ["chats:write"], "chats:write"),
        ("holdfast_scopes", ["chats:read", "usage:read"], "usage:read"),
        ("holdfast_scopes", "chats:read chats:send", "array"),
        ("holdfast_scopes", None, "array"),
        ("holdfast_scopes", {"chats:read": True}, "array"),
        ("holdfast_scopes", [["chats:read"]], "array"),
        ("chats", "chat_a", "array"),
        ("chats", None, "array"),
        ("chats", [1], "array"),
        ("chats", [f"c{n}" for n in range(CHATS_MAX + 1)], "more than 100"),
    ],
)
def test_a_claim_of_another_type_or_an_unknown_scope_is_401_and_named(
    claim: str, value: Any, named: str
) -> None:
    with pytest.raises(Unauthorized, match=claim) as caught:
        claimed(TokenSettings(), **{claim: value})
    assert named in caught.value.message and caught.value.details["claim"] == claim


# --- the socket
# --------------------------------------------------------------------------------------

FRAMES: list[tuple[AnyClientFrame, tuple[UserScope, ...]]] = [
    (Authenticate(payload=AuthenticateBody("token")), ()),
    (SendMessage(payload=SendBody("c1", "chat_1", "hello")), (SEND,)),
    (Ack(payload=AckBody("chat_1", 1, 0)), (READ,)),
    (Resume(payload=ResumeBody({})), (READ,)),
    (SyncRequest(payload=SyncBody("chat_1", 1, 0, None)), (READ,)),
    (HeartbeatAck(), ()),
    (TypingStart(payload=ChatBody("chat_1")), (READ, SEND)),
    (TypingStop(payload=ChatBody("chat_1")), (READ, SEND)),
    (Read(payload=ReadBody("chat_1", 0)), (READ,)),
]


def as_ann(scopes: frozenset[UserScope], chats: frozenset[str] | None = None) -> Principal:
    return Principal(*ANN, scopes, "user", None, chats)


def errors_of(talk: Talk) -> list[Error]:
    return [frame for frame in talk.read() if isinstance(frame, Error)]


def test_the_table_has_every_frame() -> None:
    kinds = set(get_args(AnyClientFrame))
    assert {type(frame) for frame, _ in FRAMES} == kinds == set(FRAME_SCOPES)


@pytest.mark.parametrize(
    ("frame", "needs"), FRAMES, ids=[type(frame).__name__ for frame, _ in FRAMES]
)
def test_a_frame_needs_its_scopes_and_no_other(
    frame: AnyClientFrame, needs: tuple[UserScope, ...]
) -> None:
    for lacking in needs:
        talk = Talk(principal=as_ann(USER_SCOPES - {lacking}))
        talk.receive(frame)
        (error,) = errors_of(talk)
        assert error.code == "FORBIDDEN" and error.details and error.details["scope"] == lacking
        assert lacking in error.message
    talk = Talk(principal=as_ann(frozenset(needs), frozenset({"chat_1"})))
    talk.receive(frame)
    assert errors_of(talk) == []
    if hasattr(frame.payload, "chat_id"):
        talk = Talk(principal=as_ann(USER_SCOPES, frozenset({"chat_2"})))
        talk.receive(frame)
        (error,) = errors_of(talk)
        assert error.code == "FORBIDDEN" and "chat_1" in error.message


def test_what_is_refused_for_its_scope_counts_against_the_rate() -> None:
    talk = Talk(principal=as_ann(frozenset({SEND})))
    for _ in range(200):
        talk.receive(Read(payload=ReadBody("chat_1", 0)))
    codes = [error.code for error in errors_of(talk)]
    assert codes[0] == "FORBIDDEN" and codes[-1] == "RATE_LIMITED"


async def test_who_may_not_read_gets_nothing_and_may_send() -> None:
    async with bench() as parts:
        chat_id = await parts.chat("alice", "bob")
        socket = await connected(parts, frozenset({SEND}))
        push(parts, chat_id, 1)
        await parts.gateway.push_to_chats([chat_id], ("typing",), b"\x81\x02{}")
        socket.say("send_message", "q", client_message_id="c", chat_id=chat_id, content="hi")
        await settle()
        assert [frame["type"] for frame in socket.take()] == ["message_ack"]


async def test_a_socket_is_in_no_chat_that_its_token_is_not_good_for() -> None:
    async with bench() as parts:
        mine, other = await parts.chat("alice", "bob"), await parts.chat("alice", "bob")
        socket = await connected(parts, USER_SCOPES, mine)
        socket.say("resume", "r", cursors={mine: [1, 0], other: [1, 0]})
        await settle()
        (resumed,) = socket.take()
        assert resumed["payload"]["gone"] == [other] and resumed["payload"]["joined"] == []
        late = await parts.chat("alice", "bob")
        for chat_id in (mine, other, late):
            push(parts, chat_id, 1)
            await parts.gateway.push_to_chats([chat_id], ("typing",), b"\x81\x02{}")
            parts.gateway.push_to_user(
                User("default", "alice"), chat_id, ("receipt", chat_id), b"\x81\x02{}"
            )
        await parts.gateway.roster_sync.compare_memberships()
        await parts.gateway.roster_sync.compare_heads()
        await settle()
        seen = socket.take()
        assert [frame.get("type") for frame in seen] == [
            "message",
            None,
            None,
        ], "of its own chat alone"
        assert parts.gateway.roster.in_chat(other) == parts.gateway.roster.in_chat(late) == ()
        push(parts, mine, 2)
        await settle()
        assert [frame["type"] for frame in socket.take()] == ["message"], "pushes go on"


async def test_a_new_token_that_allows_other_things_makes_the_client_reconnect() -> None:
    tokens = {"same": USER_SCOPES, "less": frozenset({READ})}

    def verify(token: str) -> Principal:
        return Principal("default", "alice", tokens[token], "user")

    async with bench(verify=verify) as parts:
        socket = await connected(parts, USER_SCOPES)
        socket.say("authenticate", "q1", token="same")
        await settle()
        assert [frame["type"] for frame in socket.take()] == ["authenticated"]
        socket.say("authenticate", "q2", token="less")
        await settle()
        assert [frame["type"] for frame in socket.take()] == ["authenticated", "connection_closing"]
        assert socket.closed == (4004, "rotation")


async def connected(parts: Bench, scopes: frozenset[UserScope], *chats: str) -> FakeSocket:
    socket = FakeSocket()
    who = Principal("default", "alice", scopes, "user", None, frozenset(chats) or None)
    socket.connection = parts.gateway.accept(socket, who, "phone")
    parts.sockets.append(socket)
    await settle()
    assert [frame["type"] for frame in socket.take()] == ["connection_established"]
    return socket


def push(parts: Bench, chat_id: str, sequence: int) -> None:
    parts.gateway.deliver(entries(chat_id, sequence))
