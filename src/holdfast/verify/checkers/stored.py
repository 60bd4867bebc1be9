"""Checkers 1 to 3: what is in the store. (Pure.)"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from holdfast.verify.checkers.verdict import Verdict
from holdfast.verify.history import ChatAtEnd, History, Pushed, Sighting


def acked_is_stored(history: History) -> Verdict:
    """1: an acked message is stored under its number, unchanged or redacted."""
    verdict = Verdict("acked is stored")
    stored = {
        chat.chat_id: {m.sequence: m for m in chat.messages} for chat in history.chats.values()
    }
    for invoke, ok, acked in history.acks():
        chat = history.chats.get(invoke.chat_id)
        if chat is not None and acked.sequence < chat.first_sequence:
            continue  # retention is a recorded act
        message = stored.get(invoke.chat_id, {}).get(acked.sequence)
        if chat is None or message is None:
            verdict.require(False, f"{invoke.chat_id} has no message {acked.sequence}", invoke, ok)
            continue
        sender = history.clients[invoke.client].user_id
        verdict.require(
            (message.message_id, message.sender_id, message.key)
            == (acked.message_id, sender, invoke.key),
            f"{invoke.chat_id} has another message at {acked.sequence}",
            invoke,
            ok,
            message,
        )
        verdict.require(
            message.digest == invoke.digest or message.sequence in chat.redacted,
            f"the content of {invoke.chat_id} {acked.sequence} is not what was sent",
            invoke,
            message,
        )
    return verdict


def one_message_per_key(history: History) -> Verdict:
    """2: a chat has one message per (sender, client id), named by every ack."""
    verdict = Verdict("one message per client id")
    for chat in history.chats.values():
        by_key: dict[tuple[str | None, str], Sighting] = {}
        for message in chat.messages:
            if message.key is not None:
                first = by_key.setdefault((message.sender_id, message.key), message)
                verdict.require(
                    first is message, f"{chat.chat_id} holds one send twice", first, message
                )
        for key in chat.keys or ():
            stored = by_key.get((key.sender_id, key.key))
            if stored is not None:
                agree = (stored.sequence, stored.message_id) == (key.sequence, key.message_id)
                verdict.require(agree, f"{chat.chat_id}: key and message disagree", key, stored)
    answers: dict[tuple[str, str, str | None], Sighting] = {}
    for invoke, ok, acked in history.acks():
        send = (invoke.chat_id, history.clients[invoke.client].user_id, invoke.key)
        first = answers.setdefault(send, acked)
        same = (first.sequence, first.message_id) == (acked.sequence, acked.message_id)
        verdict.require(same, "two answers to one key differ", first, invoke, ok)
    return verdict


def sequence_is_unique(history: History) -> Verdict:
    """3: in one epoch all see one message at (chat, sequence); numbers are sound."""
    verdict = Verdict("(chat, sequence) is unique and immutable")
    seen: dict[tuple[str, int], dict[str, tuple[int | None, object]]] = defaultdict(dict)
    for chat_id, epoch, message, evidence in _sightings(history):
        if message.message_id in history.lost:
            continue  # its number is given again in another epoch
        others = seen[chat_id, message.sequence]
        for other_id, (other_epoch, other) in others.items():
            apart = other_id == message.message_id or (
                epoch is not None and other_epoch is not None and epoch != other_epoch
            )
            verdict.require(apart, f"{chat_id} {message.sequence} is two messages", other, evidence)
        others.setdefault(message.message_id, (epoch, evidence))
    _contents_agree(history, verdict)
    for chat in history.chats.values():
        _numbers_are_sound(chat, verdict)
    return verdict


def _sightings(history: History) -> Iterator[tuple[str, int | None, Sighting, object]]:
    for chat in history.chats.values():
        for message in chat.messages:
            yield chat.chat_id, chat.epoch, message, message
    for invoke, ok, acked in history.acks():
        yield invoke.chat_id, None, acked, ok
    for invoke, _, page in history.pages():
        for message in page.messages:
            yield page.chat_id, page.epoch, message, (invoke, message)
    for push in history.of(Pushed):
        yield push.chat_id, None, push.message, push


def _contents_agree(history: History, verdict: Verdict) -> None:
    contents: dict[tuple[str, str], tuple[str, object]] = {}
    for chat_id, _, message, evidence in _sightings(history):
        chat = history.chats.get(chat_id)
        if message.digest is None or (chat is not None and message.sequence in chat.redacted):
            continue
        first, where = contents.setdefault(
            (chat_id, message.message_id), (message.digest, evidence)
        )
        verdict.require(
            first == message.digest, f"{chat_id} {message.sequence} has changed", where, evidence
        )


def _numbers_are_sound(chat: ChatAtEnd, verdict: Verdict) -> None:
    numbers = [m.sequence for m in chat.messages]
    verdict.require(
        all(n >= 1 for n in numbers), f"{chat.chat_id} has a number below 1", numbers[:1]
    )
    verdict.require(
        len(set(numbers)) == len(numbers), f"{chat.chat_id} has a number twice", chat.chat_id
    )
    verdict.require(chat.counter is not None, f"{chat.chat_id} has no counter", chat.chat_id)
    highest = max(numbers, default=0)
    verdict.require(
        chat.counter is None or highest <= chat.counter,
        f"{chat.chat_id} has counter {chat.counter} and message {highest}",
    )
