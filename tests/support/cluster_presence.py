"""What the nodes of a cluster say of who is online."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from cluster_rig import ClusterRig
from work_rigs import until


async def presence(rig: ClusterRig, chat_id: str, user: str, node: int) -> Mapping[str, Any]:
    path = f"/v1/chats/{chat_id}/presence"
    return dict(await rig.ask(user, "GET", path, node=node))


def statuses(view: Mapping[str, Any]) -> dict[str, str]:
    return {each["user_id"]: each["status"] for each in view["users"]}


async def until_presence(
    rig: ClusterRig, chat_id: str, user: str, node: int, right: Mapping[str, str]
) -> float:
    """Ask a node until its answer is right and whole; how many seconds that took."""
    began = time.monotonic()

    async def is_right() -> bool:
        await asyncio.sleep(0.1)  # within a user's rate of requests
        view = await presence(rig, chat_id, user, node)
        return statuses(view) == right and not view.get("stale")

    await until(is_right)
    return time.monotonic() - began
