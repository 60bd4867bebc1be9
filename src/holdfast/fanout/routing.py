"""From entries of the log to envelopes for gateways. (Pure.)

``route`` divides a batch, chat by chat, into runs: consecutive messages that go to the
same members. A membership event changes the members exactly where it stands: a user who
is added gets the event and what follows; a user who is removed gets the event of the
removal and nothing after it. ``envelopes`` then turns the runs into one envelope per
gateway, once the registry has said who is connected where.

``Gaps`` checks on the same entries that no sequence is missing between two neighbours
of a chat. Sequences are dense by construction, so a gap is an operator's repair or a
defect, and is reported either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence, Set
from typing import NamedTuple

from holdfast.fanout.contract import Envelope, MessageRun
from holdfast.message import LogEntry, Message, User
from holdfast.store.commands import membership_event


class RoutingResult(NamedTuple):
    """The runs of a batch, each for all members of its chat.

    ``unknown`` counts messages of chats whose members are not known. ``unreadable`` are
    events that do not say what they change: they are delivered, but their chat's
    members must be loaded again.
    """

    runs: list[MessageRun]
    unknown: int
    unreadable: list[LogEntry]


def route(
    entries: Iterable[LogEntry], members: MutableMapping[str, frozenset[User]]
) -> RoutingResult:
    """Divide a batch into runs, and update ``members`` to those after the batch.

    Chats that ``members`` does not have are skipped. A chat with an unreadable event is
    removed from it. Applying an event twice, or one that the members already reflect,
    changes nothing.
    """
    found: list[MessageRun] = []
    open_runs: dict[str, MessageRun] = {}
    unknown = 0
    unreadable: list[LogEntry] = []
    for entry in entries:
        message = entry.what
        if not isinstance(message, Message):
            continue
        chat_id = entry.chat_id
        before = members.get(chat_id)
        if before is None:
            unknown += 1
            continue
        during = after = before
        if message.kind == "event":
            audience = _audience(entry.tenant, message, before)
            if audience is None:
                unreadable.append(entry)
            else:
                during, after = audience
        run = open_runs.get(chat_id)
        if (
            run is not None
            and run.users is during
            and run.messages[-1].sequence + 1 == message.sequence
        ):
            run.messages.append(message)
        else:
            run = open_runs[chat_id] = MessageRun(entry.tenant, [message], during)
            found.append(run)
        if after is not before:
            members[chat_id] = after
    for entry in unreadable:
        members.pop(entry.chat_id, None)
    return RoutingResult(found, unknown, unreadable)


def _audience(
    tenant: str, message: Message, before: frozenset[User]
) -> tuple[frozenset[User], frozenset[User]] | None:
    """Who gets an event, and who gets what follows it; None if it cannot be read."""
    event = membership_event(message)
    if event is None:
        return None
    if event.user_id is None:
        return before, before
    user = User(tenant, event.user_id)
    if event.event == "member_added":
        after = before if user in before else before | {user}
        return after, after
    if event.event == "member_removed":
        # The store may be ahead of the log: then it has removed the user already.
        return (before, before - {user}) if user in before else (before | {user}, before)
    return before, before


def recipients(runs: Sequence[MessageRun]) -> Set[User]:
    """All users to look up. If all runs have the same members, this is that very set:
    the registry's cache then finds it by a hash that is already computed.
    """
    sets = {id(run.users): run.users for run in runs}
    return next(iter(sets.values())) if len(sets) == 1 else set[User]().union(*sets.values())


def envelopes(runs: Sequence[MessageRun], online: Mapping[str, Set[User]]) -> dict[str, Envelope]:
    """One envelope for every gateway that holds a recipient.

    ``online`` is the registry's answer for ``recipients``. If all runs have the same
    members, it is already each run's own answer.
    """
    shared = len({id(run.users) for run in runs}) == 1
    made = {gateway: _runs_for(runs, held, shared=shared) for gateway, held in online.items()}
    return {gateway: Envelope(found) for gateway, found in made.items() if found}


def _runs_for(runs: Sequence[MessageRun], held: Set[User], *, shared: bool) -> list[MessageRun]:
    """A gateway's part of the runs; adjacent runs of a chat become one."""
    found: list[MessageRun] = []
    last: dict[str, int] = {}
    for run in runs:
        users = held if shared else run.users & held
        if not users:
            continue
        first = run.messages[0]
        index = last.get(first.chat_id)
        if index is not None and found[index].messages[-1].sequence + 1 == first.sequence:
            earlier = found[index]
            messages = [*earlier.messages, *run.messages]
            found[index] = MessageRun(run.tenant, messages, earlier.users)
        else:
            last[first.chat_id] = len(found)
            found.append(MessageRun(run.tenant, run.messages, users))
    return found


def undeliverable(runs: Sequence[MessageRun], online: Mapping[str, Set[User]]) -> int:
    """How many messages have no recipient connected anywhere."""
    return sum(
        len(run.messages)
        for run in runs
        if all(run.users.isdisjoint(held) for held in online.values())
    )


MAX_CHATS = 100_000
"""Chats watched at once. At the bound all are forgotten, and watching starts over."""


class Gaps:
    """Remembers each chat's newest sequence."""

    def __init__(self, max_chats: int = MAX_CHATS) -> None:
        self._max_chats = max_chats
        self._newest: dict[str, int] = {}

    def missing(self, entries: Iterable[LogEntry]) -> int:
        """How many sequences are missing before these entries. A repeat is no gap."""
        missing = 0
        newest = self._newest
        for entry in entries:
            message = entry.what
            if not isinstance(message, Message):
                continue
            last = newest.get(message.chat_id)
            if last is None:
                if len(newest) >= self._max_chats:
                    newest.clear()
            elif message.sequence > last + 1:
                missing += message.sequence - last - 1
            if last is None or message.sequence > last:
                newest[message.chat_id] = message.sequence
        return missing
