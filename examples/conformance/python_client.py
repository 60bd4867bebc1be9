"""Drives the Python client for the conformance suite: commands in, events out, one JSON
object a line.

    holdfast conformance -- python examples/conformance/python_client.py

A program for a client in another language does the same;
docs/guides/client-conformance.md has the lines.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable
from typing import Any

from holdfast.client import ChatGone, ChatReset, Client, ClientSettings, Message, ReplyProgress
from holdfast.errors import HoldfastError


def emit(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


class Driver:
    """One client, from ``start`` to ``stop``."""

    def __init__(self, start: dict[str, Any]) -> None:
        seconds = {
            name.removesuffix("_ms"): value / 1000 for name, value in start["timings"].items()
        }
        settings = ClientSettings(
            reconnect_initial_seconds=seconds["reconnect_initial"],
            reconnect_cap_seconds=seconds["reconnect_cap"],
            connect_timeout_seconds=seconds["connect_timeout"],
            reply_timeout_seconds=seconds["answer_timeout"],
            closing_timeout_seconds=seconds["closing_timeout"],
            ack_interval_seconds=seconds["ack_interval"],
        )
        self.chat_id: str = start["chat_id"]
        self.client = Client(start["url"], self._token, state=start["state"], settings=settings)
        self.tokens: asyncio.Queue[str] = asyncio.Queue(maxsize=8)
        self._epoch = 1

    async def _token(self) -> str:
        emit("token_wanted")
        return await self.tokens.get()

    async def send(self, content: str, client_message_id: str) -> None:
        try:
            sent = await self.client.send(
                self.chat_id, content, client_message_id=client_message_id
            )
            emit("sent", client_message_id=sent.client_message_id)
        except HoldfastError as error:
            emit("refused", client_message_id=client_message_id, code=error.code)

    async def show(self) -> None:
        try:
            async for event in self.client.events():
                match event:
                    case Message():
                        emit(
                            "message",
                            epoch=self._epoch,
                            sequence=event.sequence,
                            content=event.content,
                        )
                    case ChatReset(epoch=epoch):
                        self._epoch = epoch
                        emit("reset")
                    case ReplyProgress():
                        emit("reply", reply_id=event.reply_id, text=event.text, state=event.state)
                    case ChatGone():
                        emit("gone")
        except HoldfastError as error:
            emit("stopped", reason=str(error))


async def main() -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    driver = Driver(json.loads(await lines.readline()))
    tasks: set[asyncio.Task[None]] = set()

    def start(work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async with driver.client:
        start(driver.show())
        while line := await lines.readline():
            command = json.loads(line)
            match command["do"]:
                case "token":
                    driver.tokens.put_nowait(command["token"])
                case "send":
                    start(driver.send(command["content"], command["client_message_id"]))
                case "stop":
                    break
        for task in list(tasks):
            task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
