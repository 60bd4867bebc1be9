"""Clients that read replies event by event, and what they saw, for the proofs.

The scripted model repeats the words it is sent, one token each. So a reader knows what
it must get: nothing missing, nothing twice, in order.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from holdfast.verify.history import ReplyMade, ReplySeen


class SeenEvent(NamedTuple):
    """An event of a stream. ``at``: monotonic seconds."""

    at: float
    name: str
    event_id: str
    data: str


@dataclass(slots=True)
class SeenReply:
    """What one reader got of a reply, over all its connections.

    ``end``: ``done``, the code of a failure, or ``aborted`` if the connection broke.
    ``ends`` has each of them; more than one is a defect.
    """

    reply_id: str = ""
    asked: float = field(default_factory=time.monotonic)
    status: int = 0
    tokens: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    ended: float = 0.0
    failure: str = ""

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def end(self) -> str:
        return self.ends[-1] if self.ends else ""

    @property
    def succeeded(self) -> bool:
        return self.status == 200 and self.ends == ["done"]

    def gaps(self) -> list[float]:
        """Seconds between a token and the next."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    def made(self, words: str) -> ReplyMade:
        """What the scripted model makes of these words, in this reply's epoch."""
        epoch = int(self.ids[0].split("-")[0]) if self.ids else 0
        return ReplyMade(self.reply_id, epoch, [*tokens_of(words)], "done")

    def seen(self, reader: str) -> ReplySeen:
        """For checker 15. Entry 0 and the entries without text are not shown as
        tokens, so entries count from the first token.
        """
        numbers = [tuple(map(int, event_id.split("-"))) for event_id in self.ids]
        first = numbers[0][1] if numbers else 0
        entries = [
            (epoch, n - first, token)
            for (epoch, n), token in zip(numbers, self.tokens, strict=True)
        ]
        return ReplySeen(self.reply_id, reader, entries, self.ends, at=self.ended)


def most_at_once(replies: Sequence[SeenReply], token_seconds: float = 0.01) -> int:
    """How many of them were between their first and their last token at a moment; of a
    model of this pace.

    A busy reader sees an end late, perhaps after the beginning of the reply that took
    its place. So the end is counted from the token that it saw soonest.
    """

    def end(reply: SeenReply) -> float:
        times = reply.times
        return min(at + after * token_seconds for after, at in enumerate(reversed(times)))

    moves = [(reply.times[0], 1) for reply in replies] + [(end(r), -1) for r in replies]
    now = most = 0
    for _, move in sorted(moves):
        now += move
        most = max(most, now)
    return most


def tokens_of(words: str) -> Sequence[str]:
    """The tokens in which the scripted model repeats these words."""
    first, *others = words.split(" ")
    return [first, *(f" {word}" for word in others)]


def numbered_words(count: int, name: str = "w") -> str:
    return " ".join(f"{name}{number}" for number in range(count))


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[SeenEvent]:
    """The events of a stream as they come; comments are left out."""
    name = event_id = ""
    data = list[str]()
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith(":"):
            continue
        if not line:
            if data:
                yield SeenEvent(time.monotonic(), name, event_id, "\n".join(data))
            name, event_id, data = "", "", []
            continue
        key, _, value = line.partition(": ")
        match key:
            case "event":
                name = value
            case "id":
                event_id = value
            case "data":
                data.append(value)


class ReplyClient:
    """Asks one server for replies, with one credential."""

    def __init__(self, session: aiohttp.ClientSession, key: str, **options: Any) -> None:
        self._session = session
        self._options = options
        self._authorization = {"Authorization": f"Bearer {key}"}

    async def chat(
        self, words: str, model: str = "words", user: str = "", **headers: str
    ) -> SeenReply:
        """A streamed chat completion, read to its end."""
        body = chat_body(words, model, user) | {"stream": True}
        return await self.post("/v1/chat/completions", body, headers)

    async def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> SeenReply:
        seen = SeenReply()
        try:
            async with self._session.post(
                path, json=body, headers={**self._authorization, **(headers or {})}, **self._options
            ) as response:
                seen.status = response.status
                seen.reply_id = response.headers.get("X-Reply-Id", "")
                if response.status != 200:
                    _fail(seen, await response.text())
                else:
                    await _read_chat(seen, response)
        except (aiohttp.ClientError, ConnectionError) as error:
            seen.failure = repr(error)
            seen.ends.append("aborted")
        seen.ended = time.monotonic()
        return seen

    async def start(
        self, words: str, model: str = "words", user: str = "", **headers: str
    ) -> SeenReply:
        """A native reply that nobody reads yet; ``read`` continues with the result."""
        seen = SeenReply()
        async with self._session.post(
            "/v1/replies",
            json=chat_body(words, model, user),
            headers={**self._authorization, **headers},
            **self._options,
        ) as response:
            seen.status = response.status
            if response.status >= 300:
                _fail(seen, await response.text())
                return seen
            seen.reply_id = (await response.json())["id"]
        return seen

    async def cancel(self, reply_id: str) -> int:
        """Cancel a native reply; the status of the answer."""
        async with self._session.delete(
            f"/v1/replies/{reply_id}", headers=self._authorization, **self._options
        ) as response:
            return response.status

    async def read(self, seen: SeenReply, tokens_max: int = 10**9) -> SeenReply:
        """Read a native reply from where ``seen`` is, to its end or until it has so many
        tokens; a broken connection raises.
        """
        after = {"Last-Event-ID": seen.ids[-1]} if seen.ids else {}
        async with self._session.get(
            f"/v1/replies/{seen.reply_id}/events",
            headers={**self._authorization, **after},
            **self._options,
        ) as response:
            seen.status = response.status
            if response.status != 200:
                _fail(seen, await response.text())
                return seen
            async for event in events_of(response):
                _take_native(seen, event)
                if seen.ends or len(seen.tokens) >= tokens_max:
                    break
        return seen

    async def read_through(
        self, seen: SeenReply, seconds: float = 60, breaks_after: int = 10**9
    ) -> SeenReply:
        """Read to the end, over as many connections as it takes; 503 is asked again.

        ``breaks_after``: the first connection ends after so many tokens.
        """
        deadline = time.monotonic() + seconds
        while not seen.ends and time.monotonic() < deadline:
            try:
                await self.read(seen, breaks_after if len(seen.tokens) < breaks_after else 10**9)
            except (aiohttp.ClientError, ConnectionError):
                await asyncio.sleep(0.05)
            if seen.status == 503:
                seen.ends.clear()
                await asyncio.sleep(0.05)
        seen.ended = time.monotonic()
        return seen


def chat_body(words: str, model: str, user: str) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": words}]}
    return body | ({"user": user} if user else {})


async def _read_chat(seen: SeenReply, response: aiohttp.ClientResponse) -> None:
    async for event in events_of(response):
        if event.data == "[DONE]":
            seen.ends.append("done")
            continue
        chunk = json.loads(event.data)
        if "error" in chunk:
            _fail(seen, event.data)
            continue
        _take_chunk(seen, event, chunk)


def _take_native(seen: SeenReply, event: SeenEvent) -> None:
    match event.name:
        case "delta":
            if _take_chunk(seen, event, json.loads(event.data)):
                seen.ids.append(event.event_id)
        case "done":
            seen.ends.append("done")
        case "failed":
            seen.failure = event.data
            seen.ends.append(json.loads(event.data)["code"])


def _take_chunk(seen: SeenReply, event: SeenEvent, chunk: Mapping[str, Any]) -> bool:
    """Whether it had a token."""
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            seen.tokens.append(text)
            seen.times.append(event.at)
            return True
    return False


def _fail(seen: SeenReply, text: str) -> None:
    """An error object of any surface: its code."""
    seen.failure = text
    try:
        error = json.loads(text).get("error", {})
    except ValueError:
        error = {}
    seen.ends.append(str((error.get("code") if isinstance(error, dict) else "") or seen.status))
