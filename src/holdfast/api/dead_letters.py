"""Operators' endpoints of fanout's dead letters: events of the log that could not be
used. Those of jobs are in ``jobs``.

Replay does not deliver an event again: an event that is late proves nothing. It makes
the sessions of its chat compare with the store, on every node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from holdfast.api.admin import record
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call
from holdfast.api.jobs import Count
from holdfast.api.schemas import RequestBody, _Reason
from holdfast.errors import NotFound
from holdfast.fanout.dead_letters import DeadLetter
from holdfast.message import SEQUENCE_MAX

Number = Annotated[int, Meta(ge=1, le=SEQUENCE_MAX)]


class LettersQuery(RequestBody, frozen=True):
    """``before`` is the ``next_before`` of the page before."""

    before: Number | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class TheseLetters(RequestBody, frozen=True):
    numbers: Annotated[list[Number], Meta(min_length=1, max_length=1000)]
    reason: _Reason


class LetterView(Struct, frozen=True):
    """Where the event is in the log, when and why it was put aside. ``tenant`` and
    ``chat_id`` are empty if not even they could be read. ``data``, of a single letter:
    the event as it was found, without the text of a message that could be decoded.
    """

    number: int
    at: str
    shard: int
    offset: int
    reason: str
    cause: str
    tenant: str
    chat_id: str
    data: str | None = None


class LetterPage(Struct, frozen=True):
    """``counts``: of all letters, by reason."""

    letters: Sequence[LetterView]
    next_before: int | None
    counts: Mapping[str, int]


def _view(letter: DeadLetter, *, whole: bool = False) -> LetterView:
    return LetterView(
        letter.number, letter.at, letter.shard, letter.offset, letter.reason, letter.message,
        letter.tenant, letter.chat_id, letter.data.decode("utf-8", "replace") if whole else None,
    )  # fmt: skip


async def list_dead_letters(deps: ApiDeps, call: Call) -> Answer:
    asked: LettersQuery = call.query
    found = await call.in_time(deps.dead_letters.read(asked.limit + 1, asked.before))
    page = found[: asked.limit]
    counts = await call.in_time(deps.dead_letters.counts())
    more = page[-1].number if len(found) > len(page) else None
    return Answer(LetterPage([_view(letter) for letter in page], more, counts))


async def get_dead_letter(deps: ApiDeps, call: Call) -> Answer:
    text = call.path["number"]
    if not text.isdecimal() or not 0 < int(text) <= SEQUENCE_MAX:
        raise NotFound(f"no dead letter {text[:40]}")
    letter = await call.in_time(deps.dead_letters.get(int(text)))
    if letter is None:
        raise NotFound(f"no dead letter {text}: it was replayed, discarded or never existed")
    return Answer(_view(letter, whole=True))


async def replay_dead_letters(deps: ApiDeps, call: Call) -> Answer:
    """Compare first: a letter is gone only if its chat will be compared."""

    async def replay(letters: Sequence[DeadLetter]) -> int:
        chats = {letter.chat_id for letter in letters}
        deps.compare_chats([] if "" in chats else sorted(chats))
        return await deps.dead_letters.remove([letter.number for letter in letters])

    return await _acted(deps, call, "replay", replay)


async def discard_dead_letters(deps: ApiDeps, call: Call) -> Answer:
    async def discard(letters: Sequence[DeadLetter]) -> int:
        return await deps.dead_letters.remove([letter.number for letter in letters])

    return await _acted(deps, call, "discard", discard)


async def _acted(
    deps: ApiDeps,
    call: Call,
    verb: str,
    act: Callable[[Sequence[DeadLetter]], Awaitable[int]],
) -> Answer:
    """Find the letters, record the act, do it. Those that are gone do not count."""
    body: TheseLetters = call.body
    found = [await call.in_time(deps.dead_letters.get(number)) for number in set(body.numbers)]
    letters = [letter for letter in found if letter is not None]
    if not letters:
        raise NotFound("none of these dead letters exists")
    target = " ".join(str(number) for number in sorted(body.numbers))[:1000]
    await record(deps, call, f"dead_letters.{verb}", target, body.reason)
    return Answer(Count(await call.done_in_time(act(letters))))
