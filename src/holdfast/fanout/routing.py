"""From entries of the log to envelopes for gateways. (Pure.)

First ``legs`` cuts a batch by chat into legs: consecutive messages that go to the same members. Membership events
change the members at their exact place: who is added gets the event and what follows, who is removed gets the
event of the removal and nothing after it. Then ``envelopes`` turns legs into one envelope per gateway, once it is
known who is connected where.

Whether the log is dense: between two neighbours of a chat no sequence may be missing. (Pure.)

Sequences are dense by construction, so a gap is an operator's repair or a defect; either way somebody should know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence, Set
from typing import NamedTuple

from holdfast.fanout.contract import Envelope, Stretch
from holdfast.message import LogEntry, Message, User
from holdfast.store.commands import membership_event


class Leg(NamedTuple):
    """Consecutive messages of one chat, and everybody who is to get them."""

    tenant: str
    messages: list[Message]
    members: Set[User]


class RoutingResult(NamedTuple):
    """What a batch comes to. ``unknown``: messages of chats whose members are not known. ``unreadable``: events
    that do not say what they change; they are delivered, but their chat's members must be loaded anew."""

    legs: list[Leg]
    unknown: int
    unreadable: list[LogEntry]


def legs(entries: Iterable[LogEntry], members: MutableMapping[str, frozenset[User]]) -> RoutingResult:
    """Cut a batch; ``members`` is moved on to the members after it. Chats it does not name are left out, and so is,
    after it, a chat with an event that cannot be read.

    Applying an event twice changes nothing, and so does one that the members already reflect.
    """
    found: list[Leg] = []
    open_legs: dict[str, Leg] = {}
    unknown = 0
    unreadable: list[LogEntry] = []
    for entry in entries:
        message = entry.message
        chat_id = message.chat_id
        before = members.get(chat_id)
        if before is None:
            unknown += 1
            continue
        during = after = before
        if message.kind == "event":
            around = _around(entry, before)
            if around is None:
                unreadable.append(entry)
            else:
                during, after = around
        leg = open_legs.get(chat_id)
        if leg is not None and leg.members is during and leg.messages[-1].sequence + 1 == message.sequence:
            leg.messages.append(message)
        else:
            leg = open_legs[chat_id] = Leg(entry.tenant, [message], during)
            found.append(leg)
        if after is not before:
            members[chat_id] = after
    for entry in unreadable:
        members.pop(entry.message.chat_id, None)
    return RoutingResult(found, unknown, unreadable)


def _around(entry: LogEntry, before: frozenset[User]) -> tuple[frozenset[User], frozenset[User]] | None:
    """Who gets an event, and who gets what follows it; None if the event cannot be read."""
    event = membership_event(entry.message)
    if event is None:
        return None
    if event.user_id is None:
        return before, before
    user = User(entry.tenant, event.user_id)
    if event.event == "member_added":
        after = before if user in before else before | {user}
        return after, after
    if event.event == "member_removed":
        # The store may be ahead of the log: then the removed are not among the members any more.
        return (before, before - {user}) if user in before else (before | {user}, before)
    return before, before


def recipients(cut: Sequence[Leg]) -> Set[User]:
    """Everybody to be looked up; of legs with the same members, that very set."""
    sets = {id(leg.members): leg.members for leg in cut}
    return next(iter(sets.values())) if len(sets) == 1 else set[User]().union(*sets.values())


def envelopes(cut: Sequence[Leg], online: Mapping[str, Set[User]]) -> dict[str, Envelope]:
    """One envelope for every gateway that holds somebody to whom something goes. ``online`` answers ``recipients``:
    where all legs have the same members, those a gateway holds are the same for each."""
    shared = len({id(leg.members) for leg in cut}) == 1
    made = {gateway: _stretches(cut, held, shared=shared) for gateway, held in online.items()}
    return {gateway: Envelope(stretches) for gateway, stretches in made.items() if stretches}


def _stretches(cut: Sequence[Leg], held: Set[User], *, shared: bool) -> list[Stretch]:
    """The legs that concern a gateway; those of a chat that follow each other become one stretch."""
    stretches: list[Stretch] = []
    last: dict[str, int] = {}
    for leg in cut:
        users = held if shared else leg.members & held
        if not users:
            continue
        first = leg.messages[0]
        index = last.get(first.chat_id)
        if index is not None and stretches[index].messages[-1].sequence + 1 == first.sequence:
            earlier = stretches[index]
            stretches[index] = Stretch(leg.tenant, [*earlier.messages, *leg.messages], earlier.users)
        else:
            last[first.chat_id] = len(stretches)
            stretches.append(Stretch(leg.tenant, leg.messages, users))
    return stretches


def undeliverable(cut: Sequence[Leg], online: Mapping[str, Set[User]]) -> int:
    """Messages for which nobody is connected anywhere."""
    return sum(len(leg.messages) for leg in cut if all(leg.members.isdisjoint(held) for held in online.values()))


MAX_CHATS = 100_000
"""Chats watched at once; at the bound all are forgotten and watching starts anew."""


class Gaps:
    """Remembers each chat's newest sequence."""

    def __init__(self, max_chats: int = MAX_CHATS) -> None:
        self._max_chats = max_chats
        self._newest: dict[str, int] = {}

    def missing(self, entries: Iterable[LogEntry]) -> int:
        """How many sequences are missing before these entries. Repeated entries are no gap."""
        missing = 0
        newest = self._newest
        for entry in entries:
            message = entry.message
            last = newest.get(message.chat_id)
            if last is None:
                if len(newest) >= self._max_chats:
                    newest.clear()
            elif message.sequence > last + 1:
                missing += message.sequence - last - 1
            if last is None or message.sequence > last:
                newest[message.chat_id] = message.sequence
        return missing
