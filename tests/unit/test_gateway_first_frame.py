"""Clients whose headers cannot carry a credential: the first frame is judged as a header would be."""

from __future__ import annotations

import pytest
from plane import FakeSocket, bench, settle

from holdfast.access import Principal
from holdfast.errors import RateLimited
from holdfast.verify.virtual import run


@pytest.mark.parametrize("device_id", ["x" * 65, "a b", "\n", "é"])
def test_a_device_that_no_header_could_name_is_refused(device_id: str) -> None:
    async def story() -> None:
        async with bench() as parts:
            socket = parts.connect(None)
            socket.say("authenticate", "a", token="alice", device_id=device_id)
            await settle()
            error, closing = socket.take()
            assert error["payload"]["code"] == "INVALID_MESSAGE" and error["request_id"] == "a"
            assert closing["payload"]["reason"] == "unauthorized"

    run(story())


def test_who_meets_a_limit_is_asked_back_later_and_not_for_ever_away() -> None:
    def identify(principal: Principal) -> None:
        raise RateLimited("too many connections", retry_after_seconds=3)

    async def story() -> None:
        async with bench() as parts:
            socket = FakeSocket()
            socket.connection = parts.gateway.accept(socket, None, "", identify)
            parts.sockets.append(socket)
            socket.say("authenticate", "a", token="alice")
            await settle()
            error, closing = socket.take()
            assert (error["payload"]["code"], closing["payload"]["reason"]) == ("RATE_LIMITED", "overloaded")
            assert socket.closed == (4005, "overloaded")

    run(story())
