"""A chat of a cluster whose messages leave by webhook."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from cluster_rig import ClusterRig
from webhook_rig import Receiver, until

HOOKED = "hooked"
"""The tenant whose messages go to a webhook. One node reads the log for it, by lease."""
WITH_WEBHOOKS = {"work.webhooks.private_allowed": True}


class HookedChat:
    """A chat whose messages leave by webhook. Who reads the log under an old fence
    would make a second job of a message.
    """

    def __init__(self, rig: ClusterRig, receiver: Receiver, chat_id: str) -> None:
        self._rig, self._receiver, self._chat_id = rig, receiver, chat_id
        self._sent = 0

    @classmethod
    async def made(cls, rig: ClusterRig, receiver: Receiver) -> HookedChat:
        body = {"url": receiver.url, "tenant": HOOKED, "reason": "test"}
        await asyncio.to_thread(rig.operator(0).post, "/admin/webhooks", body=body)
        return cls(rig, receiver, await rig.chat("hal", tenant=HOOKED))

    async def say(self, node: int) -> None:
        self._sent += 1
        path, key = f"/v1/chats/{self._chat_id}/messages", f"key-{self._sent}"
        await self._rig.ask("hal", "POST", path, {"content": key}, node, HOOKED, key)

    async def is_whole(self) -> None:
        """Wait until every message has left; each is one job, whose calls have one id."""
        everything = set(range(1, self._sent + 1))
        await until(lambda: set(self._receiver.sequences()) == everything)
        ids = defaultdict[int, set[str]](set)
        for sequence, (headers, _) in zip(
            self._receiver.sequences(), self._receiver.calls, strict=True
        ):
            ids[sequence].add(headers["webhook-id"])
        assert all(len(each) == 1 for each in ids.values()), ids
