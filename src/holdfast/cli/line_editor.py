"""The line that a user types at a terminal, byte by byte. (Pure.)

The terminal is in cbreak mode, so that messages can be shown while the user types; so
echo and editing are done here.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass

LINE_CHARACTERS_MAX = 4096
"""No longer message can be sent; at the bound further characters are ignored."""


@dataclass(frozen=True, slots=True)
class Entered:
    """Enter was pressed."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Ctrl+D on an empty line, or Ctrl+C."""


_Key = Entered | Ended


class LineEditor:
    """Text, Backspace, Ctrl+U (all), Ctrl+W (a word), Enter, Ctrl+C, Ctrl+D.

    Escape sequences are ignored.
    """

    def __init__(self) -> None:
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._escape = ""

    def feed(self, data: bytes) -> list[_Key]:
        keys: list[_Key] = []
        for character in self._decoder.decode(data):
            if self._escape or character == "\x1b":
                self._in_escape(character)
            elif (key := self._typed(character)) is not None:
                keys.append(key)
        return keys

    def _in_escape(self, character: str) -> None:
        """Skip an escape sequence, such as an arrow key: ESC [ … x, ESC O x, ESC x."""
        self._escape += character
        introducer = self._escape[1:2]
        if introducer == "[":
            done = len(self._escape) > 2 and "@" <= character <= "~"
        elif introducer == "O":
            done = len(self._escape) > 2
        else:
            done = len(self._escape) > 1
        if done:
            self._escape = ""

    def _typed(self, character: str) -> _Key | None:
        match character:
            case "\r" | "\n":
                text, self.text = self.text, ""
                return Entered(text)
            case "\x03":
                return Ended()
            case "\x04":
                return None if self.text else Ended()
            case "\x7f" | "\x08":
                self.text = self.text[:-1]
            case "\x15":
                self.text = ""
            case "\x17":
                self.text = self.text.rstrip().rpartition(" ")[0] + (
                    " " if " " in self.text.rstrip() else ""
                )
            case _ if character.isprintable() and len(self.text) < LINE_CHARACTERS_MAX:
                self.text += character
            case _:
                pass
        return None
