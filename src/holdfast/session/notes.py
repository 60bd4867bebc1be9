"""Frames that expect no answer: how far the device has a chat, how far its user has read it, who is typing. (Pure.)"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from holdfast.errors import HoldfastError, InvalidMessage, NotAMember
from holdfast.session.effects import Delivered, IsTyping, WasRead
from holdfast.session.places import ChatProgress
from holdfast.wire.frames import Ack, AckBody, Read, ReadBody, TypingStart, TypingStop

Note = Ack | Read | TypingStart | TypingStop


def note(frame: Note, places: Mapping[str, ChatProgress]) -> Delivered | WasRead | IsTyping | HoldfastError | None:
    """What the frame means; an error if it cannot be; None if it says nothing new."""
    chat_id = frame.payload.chat_id
    if (place := places.get(chat_id)) is None:
        return NotAMember("not a member of this chat", chat_id=chat_id)
    match frame:
        case Ack(payload=body):
            return _acked(place, body)
        case Read(payload=body):
            return _read(place, body)
        case _:
            return IsTyping(chat_id, active=isinstance(frame, TypingStart))


def _acked(place: ChatProgress, body: AckBody) -> Delivered | HoldfastError | None:
    """An ack of an older epoch crossed with the news of the newer; one beyond what was sent is a client's defect."""
    if body.epoch > place.epoch or (body.epoch == place.epoch and body.sequence > place.through):
        return InvalidMessage(
            f"acked {body.sequence} in epoch {body.epoch}; {place.through} in epoch {place.epoch} is the last one sent",
            field="sequence",
            chat_id=body.chat_id,
        )
    if body.epoch < place.epoch or body.sequence <= place.acked:
        return None
    place.acked = body.sequence
    return Delivered(body.chat_id, place.epoch, body.sequence)


def _read(place: ChatProgress, body: ReadBody) -> WasRead | HoldfastError | None:
    """What was read may have come another way (REST, another device), so only the chat's end bounds it.

    In a chat whose epoch is not known yet it waits for that: without one it would count nowhere.
    """
    if body.sequence > place.heard:
        return InvalidMessage(
            f"read up to {body.sequence}, but the chat ends at {place.heard}", field="sequence", chat_id=body.chat_id
        )
    if not place.epoch:
        place.read = max(place.read, body.sequence)
        return None
    return WasRead(body.chat_id, place.epoch, body.sequence)


def reads_that_waited(places: Mapping[str, ChatProgress], chat_ids: Iterable[str]) -> Iterator[WasRead]:
    """What was read in these chats before their epoch was known, where it is now; each once."""
    for chat_id in chat_ids:
        if (place := places.get(chat_id)) is not None and place.read and place.epoch:
            yield WasRead(chat_id, place.epoch, place.read)
            place.read = 0
