"""Connections above the work rate are not read, then closed; of one that does not read
only one pong is kept.
"""

from __future__ import annotations

import asyncio

import pytest
from gateway_rig import FakeSocket, bench, settle

from holdfast.gateway.settings import GatewaySettings
from holdfast.session.settings import InboundSettings, TimeoutSettings
from holdfast.telemetry.metrics import REGISTRY

BURST = InboundSettings().work_rate_limit_burst
PONG = b"\x8a"


async def flood(socket: FakeSocket, seconds: float) -> None:
    """A client that always has something to read: as much as is read at a time,
    whenever the socket is read.
    """
    for _ in range(int(seconds * 4)):
        if socket.reading and socket.closed is None:
            socket.connection.work_done(682)
        await asyncio.sleep(0.25)


async def test_above_the_work_rate_a_socket_is_not_read_until_the_rate_allows_it() -> None:
    async with bench() as parts:
        socket = parts.connect("alice")
        await settle()
        before = (
            REGISTRY.get_sample_value(
                "holdfast_gateway_signs_total", {"sign": "work_rate_exceeded"}
            )
            or 0
        )
        socket.connection.work_done(BURST)
        assert socket.reading
        socket.connection.work_done(100)
        assert not socket.reading
        after = REGISTRY.get_sample_value(
            "holdfast_gateway_signs_total", {"sign": "work_rate_exceeded"}
        )
        assert after == before + 1
        await asyncio.sleep(0.4)
        assert not socket.reading, "100 frames are half a second"
        await asyncio.sleep(0.4)
        assert socket.reading
        assert socket.closed is None


async def test_client_that_floods_for_10_s_is_closed_and_asked_to_wait_30_s() -> None:
    async with bench() as parts:
        socket = parts.connect("alice")
        await settle()
        socket.take()
        await flood(socket, 9)
        assert socket.closed is None
        await flood(socket, 5)
        assert socket.closed == (4009, "rate_limited")
        closing = socket.take()[-1]["payload"]
        assert closing["reconnect_allowed"]
        assert closing["reconnect_delay_ms"] >= 30_000


async def test_a_flood_before_authentication_is_closed_for_good() -> None:
    limits = GatewaySettings(timeouts=TimeoutSettings(authentication_seconds=60))
    async with bench(limits) as parts:
        socket = parts.connect(None)
        await flood(socket, 14)
        assert socket.closed == (4502, "unauthorized")
        assert "too many frames" in socket.take()[-1]["payload"]["message"]


async def test_a_socket_is_read_again_only_when_no_reason_is_left_to_pause_it() -> None:
    async with bench() as parts:
        socket = parts.connect("alice")
        assert not socket.reading, "it is opening"
        socket.connection.work_done(BURST + 1000)
        await settle()
        assert socket.connection.established
        assert not socket.reading, "established, but above the work rate"
        await asyncio.sleep(5.5)
        assert socket.reading


@pytest.mark.parametrize("user_id", ["alice", None])
async def test_while_a_socket_takes_nothing_only_the_last_ping_is_answered(
    user_id: str | None,
) -> None:
    async with bench() as parts:
        socket = parts.connect(user_id)
        await settle()
        socket.writes.clear()
        socket.connection.ping_received(b"first")
        assert socket.writes == [PONG + b"\x05first"]
        socket.connection.writing_paused()
        for n in range(50):
            socket.connection.ping_received(b"%d" % n)
        await settle()
        assert len(socket.writes) == 1, "nothing is written to a socket that takes nothing"
        socket.connection.writing_resumed()
        await settle()
        assert socket.writes[1:] == [PONG + b"\x0249"]
        socket.writes.clear()


@pytest.mark.parametrize("user_id", ["alice", None])
async def test_no_pong_follows_a_close(user_id: str | None) -> None:
    async with bench() as parts:
        socket = parts.connect(user_id)
        await settle()
        socket.connection.protocol_broken("broken")
        written = len(socket.writes)
        socket.connection.ping_received(b"x")
        assert len(socket.writes) == written
