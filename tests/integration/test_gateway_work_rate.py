"""Real sockets that send more than they may: little is read of them at a time, nothing
piles up for them, and every closing reaches who goes on sending.
"""

from __future__ import annotations

import asyncio
import json
import signal
import struct
from asyncio import Transport
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from flooder import PING, TEXT, frame, said
from program import Program
from sockets import running_node, token
from websocket_sender import Sender

from holdfast.gateway.connection import Connection
from holdfast.gateway.handshake import UpgradeRequest
from holdfast.gateway.transport.port import READ_BYTES_MAX
from holdfast.gateway.transport.upgrade import WebSocketUpgrade
from holdfast.telemetry.metrics import REGISTRY
from holdfast.wire.assembler import CLOSE

pytestmark = pytest.mark.real_time("uvloop")

PINGS = 20_000
UNBOUNDED = {
    "gateway__backpressure__inbound__other_rate_limit_per_second": 1e9,
    "gateway__backpressure__inbound__other_rate_limit_burst": 10**9,
    "gateway__backpressure__inbound__work_rate_limit_per_second": 2e9,
    "gateway__backpressure__inbound__work_rate_limit_burst": 2 * 10**9,
}
"""No rate keeps a flood from being read."""
QUEUED_BYTES_MAX = 1024
"""What may wait in the transport of a socket that takes nothing: the rest of one frame.
"""


def closing_of(data: bytes) -> tuple[str, int]:
    """The reason of the ``connection_closing`` and the code of the close frame at the
    end of what a client got.
    """
    at = data.rindex(b'{"type":"connection_closing"')
    text, _, close = data[at:].rpartition(b"\x88")
    (code,) = struct.unpack("!H", close[1:3])
    return json.loads(text)["payload"]["reason"], code


@pytest.mark.parametrize("authenticated", [True, False])
async def test_pings_of_a_client_that_does_not_read_pile_up_nowhere(
    tmp_path: Path, authenticated: bool
) -> None:
    async with running_node(tmp_path, **UNBOUNDED) as node:
        credential = token(node, "alice") if authenticated else ""
        sender = Sender(node.settings.server.port, credential, receive_buffer=4096)
        await sender.connect(b"connection_established" if authenticated else b"\r\n\r\n")
        (connection,) = node.gateway.open_connections
        most = 0
        with suppress(TimeoutError):  # it is not read: its writes block
            async with asyncio.timeout(2):
                for _ in range(200):
                    await sender.send(frame(PING, b"x" * 125) * 500)
                    most = max(most, connection._socket.unsent)
        assert most <= QUEUED_BYTES_MAX
        sender.socket.close()


async def test_little_of_a_socket_is_handled_in_one_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[int, int]] = []
    begun, all_read = asyncio.Event(), asyncio.Event()
    turn = 0
    work_done = Connection.work_done

    def count(connection: Connection, work: int) -> None:
        reads.append((turn, work))
        work_done(connection, work)
        begun.set()
        if sum(work for _, work in reads) >= PINGS:
            all_read.set()

    monkeypatch.setattr(Connection, "work_done", count)

    async with running_node(tmp_path, **UNBOUNDED) as node:

        async def turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(turns())
        sender = await Sender(node.settings.server.port, token(node, "alice")).connect(
            b"connection_established"
        )
        await sender.send(frame(PING)[:3])
        await begun.wait()
        await sender.send(frame(PING)[3:] + frame(PING) * PINGS)
        await all_read.wait()
        counting.cancel()
        sender.socket.close()

    assert reads[0][1] == 1, "half of a frame is work, too: it had to be read"
    assert max(work for _, work in reads) <= READ_BYTES_MAX // 6 + 1
    assert len({turn for turn, _ in reads}) == len(reads), (
        "one read a turn, though more was there to be read"
    )


async def test_flooding_client_can_read_why_it_is_closed(tmp_path: Path) -> None:
    async with running_node(
        tmp_path,
        gateway__backpressure__inbound__work_pause_seconds_max=0.5,
        gateway__backpressure__inbound__work_pause_window_seconds=1.5,
    ) as node:
        sender = await Sender(node.settings.server.port, token(node, "alice")).connect(
            b"connection_established"
        )

        async def send() -> None:
            with suppress(ConnectionError):
                while True:
                    await sender.send(frame(TEXT, b'{"type":"heartbeat_ack"}') * 1_000)

        sending = asyncio.create_task(send())
        assert closing_of(await sender.read_to_end()) == ("rate_limited", 4009)
        sending.cancel()
        sender.socket.close()


@pytest.mark.parametrize("defect", [False, True])
async def test_client_that_goes_on_sending_can_read_the_close_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: bool
) -> None:
    def meet_defect(connection: Connection, data: bytes) -> None:
        raise RuntimeError("a defect")

    async with running_node(tmp_path) as node:
        sender = await Sender(node.settings.server.port, token(node, "alice")).connect(
            b"connection_established"
        )
        if defect:
            monkeypatch.setattr(Connection, "frame_received", meet_defect)
        ending = frame(TEXT, b"{}") if defect else frame(CLOSE, b"\x03\xe8bye")

        async def send() -> None:
            with suppress(ConnectionError):
                await sender.send(ending + frame(PING) * 50_000)

        sending = asyncio.create_task(send())
        got = await sender.read_to_end()
        assert got.endswith(b"\x88\x02\x03\xf3" if defect else b"\x88\x05\x03\xe8bye")
        assert node.gateway.connections == 0
        sender.socket.close()
        sending.cancel()


async def test_refused_handshake_that_goes_on_sending_can_read_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: list[Sender] = []
    decide = WebSocketUpgrade._decide

    def decide_late(
        entrance: WebSocketUpgrade, request: UpgradeRequest, transport: Transport
    ) -> Any:
        senders[-1].socket.send(frame(PING))  # comes behind what was read, and before the answer
        return decide(entrance, request, transport)

    monkeypatch.setattr(WebSocketUpgrade, "_decide", decide_late)

    async with running_node(tmp_path) as node:
        senders.append(Sender(node.settings.server.port, "none"))
        await senders[0].connect(b"HTTP/1.1 401")
        assert b"UNAUTHORIZED" in senders[0].got + await senders[0].read_to_end()
        senders[0].socket.close()


async def test_unread_responses_count_in_the_budget_and_the_fullest_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shed() -> float:
        return REGISTRY.get_sample_value("holdfast_gateway_http_connections_shed_total") or 0

    async with running_node(tmp_path, gateway__memory_budget_bytes=4_000) as node:
        before = shed()
        asking = Sender(node.settings.server.port, receive_buffer=4_096)
        await asking._loop.sock_connect(asking.socket, ("127.0.0.1", node.settings.server.port))
        await asking.send(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        async with asyncio.timeout(10):
            while shed() == before:
                # who reads is not concerned
                async with httpx.AsyncClient(base_url=node.url) as http:
                    assert len((await http.get("/openapi.json")).content) > 20_000
                await asyncio.sleep(0.05)
        with suppress(ConnectionError):
            # sooner than a connection is closed that asks nothing more
            async with asyncio.timeout(3):
                await asking.read_to_end()
        asking.socket.close()
        assert node.gateway.memory_budget.unread_responses == {}

    assert [record.message for record in caplog.records if record.exc_info] == []


async def test_sending_clients_all_get_the_reason_of_a_shutdown(tmp_path: Path) -> None:
    program = Program(tmp_path / "state")
    server = program.serve()

    async def send(sender: Sender) -> None:
        data = frame(
            TEXT, said("send_message", chat_id="none", client_message_id="k", content="x" * 500)
        )
        with suppress(ConnectionError):
            while True:
                await sender.send(data)
                await asyncio.sleep(1 / 150)

    try:
        senders = []
        for n in range(10):
            credential = program.ok("token", "--user", f"user{n}").strip()
            senders.append(
                await Sender(program.port, credential).connect(b"connection_established")
            )
        sending = [asyncio.create_task(send(sender)) for sender in senders]
        await asyncio.sleep(0.3)
        # a busy moment: there is more to be read than one turn of the loop takes
        server.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        server.send_signal(signal.SIGCONT)
        ends = await asyncio.gather(
            *(sender.read_to_end() for sender in senders), return_exceptions=True
        )
        for task in sending:
            task.cancel()
        for sender in senders:
            sender.socket.close()
        lost = [end for end in ends if isinstance(end, BaseException)]
        assert lost == []
        assert {closing_of(end) for end in ends if isinstance(end, bytes)} == {
            ("server_shutdown", 4000)
        }
    finally:
        program.stop()
