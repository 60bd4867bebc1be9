"""Which messages an assistant replies to. (Pure.)

``auto``: every text in a direct chat, and texts with ``@name`` in groups; ``always``:
every text; ``mention``: texts with ``@name`` only. The name is the assistant's user id,
in any case. Messages of assistants trigger none, so that two of them cannot talk to
each other without end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType

from holdfast.message import ChatKind, Message
from holdfast.streaming.settings import AssistantSettings

NONE: Mapping[str, AssistantSettings] = MappingProxyType({})


class Assistants:
    """The assistants of all tenants."""

    def __init__(self, settings: Iterable[AssistantSettings]) -> None:
        self._by_tenant: dict[str, dict[str, AssistantSettings]] = {}
        for each in settings:
            self._by_tenant.setdefault(each.tenant, {})[each.user] = each

    def __bool__(self) -> bool:
        return bool(self._by_tenant)

    def of(self, tenant: str) -> Mapping[str, AssistantSettings]:
        """The tenant's assistants, by user id."""
        return self._by_tenant.get(tenant, NONE)

    def may_trigger(self, tenant: str, message: Message) -> Sequence[AssistantSettings]:
        """The assistants that reply to this message in some chat, were they members."""
        found = self.of(tenant)
        if not found or message.kind != "text" or not message.content or message.sender_id in found:
            return ()
        return [
            each
            for each in found.values()
            if each.trigger != "mention" or mentions(message.content, each.user)
        ]


def triggers(assistant: AssistantSettings, message: Message, kind: ChatKind) -> bool:
    """Whether a text triggers an assistant that is a member of its chat."""
    if assistant.trigger == "always" or (assistant.trigger == "auto" and kind == "direct"):
        return True
    return mentions(message.content, assistant.user)


def mentions(text: str, user: str) -> bool:
    """Whether ``@user`` stands in the text as a word of its own."""
    if "@" not in text:
        return False
    return re.search(rf"(?<![\w@]){re.escape('@' + user)}(?![\w@-])", text, re.I) is not None


def reply_id_of(message: Message, assistant: str) -> str:
    """The reply's id, the same however often its job is made or run.

    It is also the message's ``client_message_id``. The message's own id keeps replies
    apart if a restored chat gives a sequence to another message.
    """
    return reply_id(message.chat_id, message.sequence, message.message_id, assistant)


def reply_id(chat_id: str, sequence: int, message_id: str, assistant: str) -> str:
    of = "\0".join((chat_id, str(sequence), message_id, assistant))
    return f"reply_{blake2b(of.encode(), digest_size=16).hexdigest()}"
