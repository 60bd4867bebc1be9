"""A client on a slow link that only answers, as a browser does."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from flooder import TEXT, frame, said
from sockets import create_chat, token
from websocket_sender import Sender

from holdfast.node.lifecycle import running
from holdfast.session.settings import TimeoutSettings
from holdfast.settings import load

pytestmark = pytest.mark.real_time("uvloop")

MESSAGES, CONTENT_BYTES = 10, 4_000
READ_BYTES, READ_SECONDS = 2_048, 0.1
"""20 KB a second: the page, which fits into the buffers of the kernels, is on its way
for two seconds.

Meanwhile every heartbeat must begin again: what a proxy may still hold is allowed the
time of a link ten times as fast.
"""
HEARTBEAT_SECONDS = 0.4


class Timeouts(TimeoutSettings):
    """Allows a proxy ten times the speed at which the client reads."""

    slow_link_bytes_per_second: ClassVar[float] = 10 * READ_BYTES / READ_SECONDS


async def test_a_client_that_takes_a_page_slowly_is_not_idle_though_it_says_nothing(
    tmp_path: Path,
) -> None:
    server = {"server.port": 0, "server.state_dir": str(tmp_path), "server.log_level": "error"}
    heartbeat = {
        "gateway.timeouts.heartbeat_interval_seconds": HEARTBEAT_SECONDS,
        "gateway.timeouts.heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
    }
    settings = load(None, {}, {**server, **heartbeat})
    timeouts = Timeouts(**asdict(settings.gateway.timeouts))
    settings = replace(settings, gateway=replace(settings.gateway, timeouts=timeouts))
    async with asyncio.timeout(120), running(settings) as node:
        chat_id = await create_chat(node, "alice")
        headers = {"Authorization": f"Bearer {token(node, 'alice')}"}
        async with httpx.AsyncClient(base_url=node.url, headers=headers) as http:
            for n in range(MESSAGES):
                body = {"content": "x" * CONTENT_BYTES}
                sent = await http.post(
                    f"/v1/chats/{chat_id}/messages", json=body, headers={"Idempotency-Key": f"k{n}"}
                )
                assert sent.status_code < 300, sent.text
        reader = Sender(node.settings.server.port, token(node, "alice"), receive_buffer=4_096)
        await reader.connect(b"connection_established")
        await reader.send(
            frame(TEXT, said("sync_request", chat_id=chat_id, epoch=0, after_sequence=0))
        )
        loop = asyncio.get_running_loop()
        began, got = loop.time(), b""
        while len(got) < MESSAGES * CONTENT_BYTES:
            more = await loop.sock_recv(reader.socket, READ_BYTES)
            assert more, "closed in the middle of the page"
            got += more
            await asyncio.sleep(READ_SECONDS)
        assert loop.time() - began > 3 * HEARTBEAT_SECONDS
        (connection,) = node.gateway.open_connections
        assert connection.closing is None
        rest = await reader.read_to_end()
        closing = (got + rest)[(got + rest).rindex(b'{"type":"connection_closing"') :]
        assert json.loads(closing.rpartition(b"\x88")[0])["payload"]["reason"] == "idle_timeout", (
            "it took everything"
        )
        reader.socket.close()
