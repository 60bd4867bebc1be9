"""Wraps the prose of a Markdown page; tables, code and headings stay as they are."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

COLUMNS = 88
_GLUE = "\0"
_ITEM = re.compile(r"( *(?:[-*]|\d+\.) +)")
_WHOLE = ("#", "|", "    ", "<!--")
"""How a line begins that is copied as it is: a heading, a row, code, a comment."""
_CODE = re.compile(r"`[^`]*`")
_NO_FIRST_WORD = re.compile(r" (?=(?:[-+*>#|]|\d+\.)(?: |$))")
"""A blank before a word that would begin a list or a heading if it came first."""


def wrapped(page: str) -> str:
    return "\n".join(_lines(page)) + "\n"


def _lines(page: str) -> Iterator[str]:
    paragraph: list[str] = []
    in_code = False
    for line in page.rstrip("\n").split("\n"):
        fence = line.lstrip().startswith("```")
        as_it_is = in_code or fence or not line or line.startswith(_WHOLE)
        if paragraph and (as_it_is or _ITEM.match(line)):
            yield from _filled(paragraph)
            paragraph = []
        if as_it_is:
            yield line
        else:
            paragraph.append(line)
        in_code ^= fence
    if paragraph:
        yield from _filled(paragraph)


def _filled(paragraph: list[str]) -> list[str]:
    """A paragraph or a list item, filled; code between backticks is not broken."""
    marker = _ITEM.match(paragraph[0])
    indent = len(paragraph[0]) - len(paragraph[0].lstrip())
    first = marker.group(1) if marker else " " * indent
    text = " ".join(line.strip() for line in paragraph)[len(first.strip()) :].strip()
    text = _CODE.sub(lambda code: code.group().replace(" ", _GLUE), text)
    text = _NO_FIRST_WORD.sub(_GLUE, text)
    filled = textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_GLUE, " ") for line in filled]
