"""A client with the commonest defect: it handles an answer later than the frame behind
it.

Pushes are handled where the socket is read; answers in a task of their own, as code
with promises or ``await`` does that asks and then waits. Driven by the conformance
suite, which must find it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import websockets


def report(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


class LateClient:
    def __init__(self, start: dict[str, Any]) -> None:
        self.url = start["url"].replace("http", "ws") + "/v1/ws"
        self.chat_id = start["chat_id"]
        self.epoch, self.sequence = 1, 0
        self.tokens: asyncio.Queue[str] = asyncio.Queue(maxsize=8)
        self.answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.asked = 0

    async def run(self) -> None:
        while True:
            report("token_wanted")
            headers = {"Authorization": f"Bearer {await self.tokens.get()}", "X-Device-ID": "late"}
            try:
                connecting = websockets.connect(
                    self.url, additional_headers=headers, compression=None
                )
                async with connecting as self.socket, asyncio.TaskGroup() as tasks:
                    tasks.create_task(self.resume())
                    tasks.create_task(self.read())
            except (OSError, websockets.WebSocketException, ExceptionGroup):
                await asyncio.sleep(0.05)

    async def ask(self, kind: str, payload: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        request_id = str(self.asked)
        answer = self.answers[request_id] = asyncio.get_running_loop().create_future()
        await self.socket.send(
            json.dumps({"type": kind, "request_id": request_id, "payload": payload})
        )
        return await answer

    async def resume(self) -> None:
        known = {self.chat_id: [self.epoch, self.sequence]} if self.sequence else {}
        for page in (await self.ask("resume", {"cursors": known}))["chats"]:
            await self.take(page)

    async def pull(self) -> None:
        cursor = {"epoch": self.epoch, "after_sequence": self.sequence}
        await self.take(await self.ask("sync_request", {"chat_id": self.chat_id, **cursor}))

    async def take(self, page: dict[str, Any]) -> None:
        for message in page["messages"]:
            self.show(message)
        self.epoch, self.sequence = page["epoch"], page["through"]
        await self.ack()
        if page["has_more"]:
            await self.pull()

    def show(self, message: dict[str, Any]) -> None:
        report(
            "message", epoch=self.epoch, sequence=message["sequence"], content=message["content"]
        )

    async def ack(self) -> None:
        payload = {"chat_id": self.chat_id, "epoch": self.epoch, "sequence": self.sequence}
        await self.socket.send(json.dumps({"type": "ack", "payload": payload}))

    async def read(self) -> None:
        async for data in self.socket:
            frame = json.loads(data)
            if (answer := self.answers.pop(frame.get("request_id", ""), None)) is not None:
                answer.set_result(frame["payload"])  # who asked goes on in a later turn of the loop
            elif frame["type"] == "message" and frame["payload"]["sequence"] > self.sequence:
                self.show(frame["payload"])
                self.sequence = frame["payload"]["sequence"]
                await self.ack()
            elif frame["type"] == "heartbeat":
                await self.socket.send(json.dumps({"type": "heartbeat_ack", "payload": {}}))
        raise ConnectionError


async def main() -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    client = LateClient(json.loads(await lines.readline()))
    running = asyncio.create_task(client.run())
    while line := await lines.readline():
        command = json.loads(line)
        if command["do"] == "token":
            client.tokens.put_nowait(command["token"])
        elif command["do"] == "stop":
            running.cancel()
            return


if __name__ == "__main__":
    asyncio.run(main())
