"""A group of sends as the arguments of one CALL, and its results as outcomes. (Pure.)

``append_1`` in the database decides as ``holdfast.store.numbering`` does elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct
from msgspec.json import Decoder

from holdfast.errors import HoldfastError
from holdfast.message import Acked, Draft, Message, Outcome
from holdfast.store.numbering import content_hash_of, key_reused
from holdfast.store.plan import halted_chat, muted, muted_in_tenant, not_a_member, unknown_chat

KEYS_REMEMBERED = 1_024

STORED, KNOWN, NO_COUNTER, TAKEN = 0, 1, 8, 9
"""Codes of ``append_1``; ``_refusal`` has the others."""

_known = Decoder(list[tuple[int, Message]])


class SendGroup(Struct):
    """The sends of a group, sorted by what becomes of them."""

    drafts: Sequence[Draft]
    outcomes: list[Outcome | None]
    asked: list[int]
    """The places of the sends for the database: each key once."""
    hashes: list[bytes]
    """Of those."""
    repeats: dict[int, int]
    """The place of a retry within the group: the place of its first."""
    later: list[int]
    """The places of sends whose key comes with another content: for a second call."""


def sorted_group(drafts: Sequence[Draft]) -> SendGroup:
    """Find what the database need not be asked: invalid sends, and equal keys."""
    group = SendGroup(drafts, [None] * len(drafts), [], [], {}, [])
    firsts: dict[tuple[str, str, str, str], tuple[int, bytes]] = {}
    for place, draft in enumerate(drafts):
        content_hash = content_hash_of(draft)
        if isinstance(content_hash, HoldfastError):
            group.outcomes[place] = content_hash
            continue
        first = firsts.setdefault((draft.sender.tenant, *draft.key), (place, content_hash))
        if first[0] == place:
            group.asked.append(place)
            group.hashes.append(content_hash)
        elif first[1] == content_hash:
            group.repeats[place] = first[0]
        else:
            group.later.append(place)
    return group


def arguments(group: SendGroup) -> tuple[list[Any], ...]:
    """The arrays of ``append_1``."""
    drafts = [group.drafts[place] for place in group.asked]
    chats: dict[tuple[str, str], int] = {}
    places = [chats.setdefault((d.chat_id, d.sender.tenant), len(chats) + 1) for d in drafts]
    return (
        [chat_id for chat_id, _ in chats],
        [tenant for _, tenant in chats],
        places,
        [d.sender.user_id for d in drafts],
        [d.client_message_id for d in drafts],
        [send_key(d.sender.user_id, d.client_message_id) for d in drafts],
        group.hashes,
        [d.content for d in drafts],
        [d.content_type for d in drafts],
        [d.message_id for d in drafts],
        [d.muted for d in drafts],
    )


@lru_cache(KEYS_REMEMBERED)
def send_key(sender_id: str, client_message_id: str) -> int:
    """The hash of a key for the index, as a signed integer of the database."""
    digest = hashlib.blake2b(f"{sender_id}\0{client_message_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def settle(group: SendGroup, row: Any) -> set[tuple[str, int]]:
    """Put the results of ``append_1`` into the group's outcomes. Returns the chats that
    it halted, with the code that says why.
    """
    known = dict(_known.decode(row["known"])) if row["known"] is not None else {}
    results = zip(row["codes"], row["sequences"], row["created_ats"], strict=True)
    halted: set[tuple[str, int]] = set()
    for n, (place, (code, sequence, created_at)) in enumerate(
        zip(group.asked, results, strict=True), 1
    ):
        draft = group.drafts[place]
        if code == STORED:
            group.outcomes[place] = Acked(_message(draft, sequence, created_at), False)
        elif code == KNOWN:
            group.outcomes[place] = Acked(known[n], True)
        else:
            group.outcomes[place] = _refusal(draft, code)
            if code in (NO_COUNTER, TAKEN):
                halted.add((draft.chat_id, code))
    for place, first in group.repeats.items():
        outcome = group.outcomes[first]
        if isinstance(outcome, Acked):
            outcome = Acked(outcome.message, True)
        group.outcomes[place] = outcome
    return halted


def _message(draft: Draft, sequence: int, created_at: str) -> Message:
    return Message(
        draft.message_id,
        draft.chat_id,
        sequence,
        "text",
        draft.sender.user_id,
        draft.client_message_id,
        draft.content,
        draft.content_type,
        created_at,
    )


def _refusal(draft: Draft, code: int) -> HoldfastError:
    match code:
        case 2:
            return key_reused(draft.client_message_id)
        case 3:
            return unknown_chat(draft.chat_id)
        case 4:
            return not_a_member(draft.chat_id)
        case 5:
            return muted_in_tenant(draft.sender.tenant)
        case 6:
            return muted(draft.chat_id)
        case _:
            return halted_chat(draft.chat_id)
