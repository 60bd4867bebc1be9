"""What a provider of model output promises.

A provider streams OpenAI's ``chat.completion.chunk`` objects. It never repeats a
request by itself: ``routing`` decides what comes after a failure.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

from holdfast.streaming.reply import Payer, ReplyError, ReplyUsage


class ProviderRequest(NamedTuple):
    """A chat completion to ask for. ``fields``: the request's fields as raw JSON,
    except ``model``, ``stream`` and ``stream_options``, which the provider adds.
    ``payer``: whose failures count as one caller's.
    """

    model: str
    fields: Mapping[str, bytes]
    reply_id: str
    payer: Payer = Payer("", "")


class ProviderChunk(Struct, frozen=True, gc=False):
    """One event of a provider's stream.

    ``data``: the JSON as it came, on one line, such that every reader can decode it;
    empty for a sign of life (a comment) and for a chunk with nothing but usage, which
    is in ``usage.chunk``. ``content``: whether it has text or a tool call (the first of
    these is the first token).
    ``finish``: whether it has a finish_reason. ``text_bytes``: how much was generated,
    for estimates of providers that count no tokens.
    """

    data: bytes
    content: bool = False
    finish: bool = False
    usage: ReplyUsage | None = None
    text_bytes: int = 0


TakeChunks = Callable[[Sequence[ProviderChunk]], None]


class PouredChunks(AsyncIterator[Sequence[ProviderChunk]]):
    """A stream that calls back where its bytes arrive: a token then costs no turn of a
    task."""

    __slots__ = ()

    @abstractmethod
    async def pour(self, take: TakeChunks) -> None:
        """As ``pour`` below. What ``take`` raises ends it."""
        ...


async def pour(chunks: AsyncIterator[Sequence[ProviderChunk]], take: TakeChunks) -> None:
    """Give the rest of a provider's stream to ``take``, as it comes, until its end."""
    if isinstance(chunks, PouredChunks):
        await chunks.pour(take)
    else:
        async for batch in chunks:
            take(batch)


class ProviderFailed(Exception):
    """The provider failed; ``error`` is how the reply ends if nothing else helps.

    ``capacity``: it has no room (429, 503, 529); ask again after
    ``retry_after_seconds``. ``final``: another provider would refuse it too (4xx).
    """

    def __init__(
        self,
        error: ReplyError,
        *,
        capacity: bool = False,
        final: bool = False,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.error = error
        self.capacity = capacity
        self.final = final
        self.retry_after_seconds = retry_after_seconds


class MovableLease(Protocol):
    """A reply's lease, as far as ``routing`` uses it."""

    @property
    def pool(self) -> str:
        """The pool that it belongs to now."""
        ...

    async def move(self, pool: str) -> None:
        """Give it back and wait for one of another pool, at the head of the user's
        list. Raises ReplyFailed if there is none in time.
        """
        ...


AttemptOutcome = Literal["done", "capacity", "refused", "unavailable", "timeout", "broken"]


class Provider(Protocol):
    """``pool``: whose leases its generations need: its own name or the default pool."""

    name: str
    pool: str

    def stream(
        self, request: ProviderRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[Sequence[ProviderChunk]]]:
        """Send the request; enter when its headers have come.

        The iterator gives what arrived together and ends after ``[DONE]`` or a finish;
        it may be PouredChunks.
        Both raise ProviderFailed and nothing else. Leaving the block closes the
        upstream connection at once unless the stream has ended. Once entered, the block
        keeps nothing of the request: it may be megabytes.
        """
        ...

    async def close(self) -> None: ...
