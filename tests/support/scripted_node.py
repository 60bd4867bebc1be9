"""A real node with scripted models, each named for what it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.access.principal import USER_SCOPES
from holdfast.message import User
from holdfast.node.lifecycle import running
from holdfast.node.node import Node
from holdfast.settings import ServerSettings, Settings
from holdfast.streaming.providers.script import ScriptSettings
from holdfast.streaming.settings import (
    ModelSettings,
    ProviderSettings,
    QueueFailoverSettings,
    ReplyClocks,
    ReplyTimes,
    StreamingSettings,
)
from holdfast.streaming.summary import ReplySummary

SCRIPTS: dict[str, dict[str, Any]] = {
    "quick": {"tokens_per_second": 0},
    "slow": {"tokens": 400, "tokens_per_second": 50},
    "tools": {"tool_arguments": '{"city": "Oslo"}', "tokens_per_second": 0},
    "short": {"finish_reason": "length", "tokens_per_second": 0},
    "refuse": {"fault": "refuse"},
    "html": {"fault": "html"},
    "truncate": {"fault": "truncate", "fault_after_tokens": 2},
    "reset": {"fault": "reset", "fault_after_tokens": 2},
    "error": {"fault": "error", "fault_after_tokens": 2},
    "stall": {"fault": "stall", "fault_after_tokens": 2},
}
STREAMING = StreamingSettings(
    times=ReplyTimes(cancel_seconds=0.2, cancel_replicated_seconds=0.3, drain_seconds=1),
    clocks=ReplyClocks(gap_seconds=0.5, first_token_seconds=2, first_token_total_seconds=2),
    queue_failover=QueueFailoverSettings(max_retries=0),
    providers=tuple(
        ProviderSettings(name, kind="scripted", script=ScriptSettings(**script))
        for name, script in SCRIPTS.items()
    ),
    models=tuple(ModelSettings(name, (f"{name}:{name}",)) for name in SCRIPTS),
)


@dataclass
class ScriptedNode:
    """A node, and a token of alice."""

    node: Node
    token: str

    @property
    def port(self) -> int:
        return self.node.settings.server.port

    @property
    def base_url(self) -> str:
        return f"{self.node.url}/v1"

    def replies(self) -> list[ReplySummary]:
        """Those that wait or run."""
        return list(self.node.streaming.parts.replies())


@asynccontextmanager
async def scripted_node(
    state: Path, streaming: StreamingSettings = STREAMING
) -> AsyncIterator[ScriptedNode]:
    server = ServerSettings(port=0, state_dir=str(state))
    async with running(replace(Settings(), server=server, streaming=streaming)) as node:
        yield ScriptedNode(node, node.tokens.mint(User("default", "alice"), 3600, USER_SCOPES))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.01)
