"""The named statements of statements.sql."""

from __future__ import annotations

import re
from importlib import resources

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def load(text: str) -> dict[str, str]:
    """Name → statement, without the comments that describe it."""
    pieces = _NAME.split(text)
    return {name: _bare(body) for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}


def _bare(body: str) -> str:
    return "\n".join(line for line in body.strip().splitlines() if not line.startswith("--"))


SQL = load((resources.files(__package__) / "statements.sql").read_text())
