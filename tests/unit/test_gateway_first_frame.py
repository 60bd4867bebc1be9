"""A credential in the first frame is judged like one in a header."""

from __future__ import annotations

import asyncio

import jwt
import pytest
from gateway_rig import FakeSocket, bench, settle

from holdfast.access.principal import Principal
from holdfast.access.tokens import Tokens, TokenSettings, shared_secret
from holdfast.errors import RateLimited
from holdfast.message import User
from proof.virtual_loop import LoopClock

SECRET = b"a secret of at least thirty-two bytes"


@pytest.mark.parametrize("device_id", ["x" * 65, "a b", "\n", "é"])
async def test_a_device_that_no_header_could_name_is_refused(device_id: str) -> None:
    async with bench() as parts:
        socket = parts.connect(None)
        socket.say("authenticate", "a", token="alice", device_id=device_id)
        await settle()
        error, closing = socket.take()
        assert error["payload"]["code"] == "INVALID_MESSAGE" and error["request_id"] == "a"
        assert closing["payload"]["reason"] == "unauthorized"


async def test_client_refused_by_a_limit_may_reconnect_later() -> None:
    def identify(principal: Principal) -> None:
        raise RateLimited("too many connections", retry_after_seconds=3)

    async with bench() as parts:
        socket = FakeSocket()
        socket.connection = parts.gateway.accept(socket, None, "", identify)
        parts.sockets.append(socket)
        socket.say("authenticate", "a", token="alice")
        await settle()
        error, closing = socket.take()
        assert (error["payload"]["code"], closing["payload"]["reason"]) == (
            "RATE_LIMITED",
            "overloaded",
        )
        assert socket.closed == (4005, "overloaded")


@pytest.mark.parametrize(
    ("audience", "closed"),
    [("holdfast", (4008, "token_expired")), ("elsewhere", (4502, "unauthorized"))],
)
async def test_an_expired_token_asks_for_a_new_one_and_any_other_bad_one_is_the_end(
    audience: str, closed: tuple[int, str]
) -> None:
    clock = LoopClock()
    keys = shared_secret(SECRET)
    tokens = Tokens(TokenSettings(), keys, clock)
    async with bench(verify=tokens.verify) as parts:
        token = Tokens(TokenSettings(audience=audience), keys, clock).mint(
            User("acme", "alice"), 60
        )
        await asyncio.sleep(66)
        socket = parts.connect(None)
        socket.say("authenticate", "a", token=token)
        error, closing = socket.take()
        assert error["payload"]["code"] == "UNAUTHORIZED" and error["request_id"] == "a"
        assert closing["payload"]["reconnect_allowed"] is (closed[0] < 4500)
        assert socket.closed == closed


async def test_a_token_that_never_says_when_it_ends_has_not_expired() -> None:
    clock = LoopClock()
    tokens = Tokens(TokenSettings(), shared_secret(SECRET), clock)
    async with bench(verify=tokens.verify) as parts:
        claims = {"iss": "holdfast", "aud": "holdfast", "sub": "alice", "iat": 0}
        for endless in (claims, claims | {"exp": "soon"}):
            socket = parts.connect(None)
            socket.say("authenticate", "a", token=jwt.encode(endless, SECRET, "HS256"))
            assert socket.closed == (4502, "unauthorized")
