"""How far the user has read, and what of that the server may not have heard. (Pure.)"""

from __future__ import annotations


class Reads:
    """The highest sequence per chat. A read has no answer, so what a connection said is owed again when it ends."""

    def __init__(self) -> None:
        self._owed: dict[str, int] = {}
        self._said: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Whether there is one to say."""
        return bool(self._owed)

    def read(self, chat_id: str, sequence: int) -> None:
        self._owed[chat_id] = max(sequence, self._owed.get(chat_id, 0))

    def say(self) -> tuple[str, int]:
        """The next to say, which is being said."""
        chat_id = next(iter(self._owed))
        sequence = self._owed.pop(chat_id)
        self._said[chat_id] = max(sequence, self._said.get(chat_id, 0))
        return chat_id, sequence

    def refused(self, chat_id: str) -> None:
        """The server wants to hear nothing of this chat."""
        self._said.pop(chat_id, None)

    def reset(self, chat_id: str) -> None:
        """What was read is numbered otherwise now."""
        self._owed.pop(chat_id, None)
        self._said.pop(chat_id, None)

    def owe_again(self) -> None:
        """What was said may have been lost."""
        for chat_id, sequence in self._said.items():
            self.read(chat_id, sequence)
        self._said.clear()
