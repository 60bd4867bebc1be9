"""Named statements and migrations out of the .sql files of a package."""

from __future__ import annotations

import re
from importlib import resources

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def load(text: str) -> dict[str, str]:
    """Name → statement, without the comments that describe it. ValueError: a name is there twice."""
    pieces = _NAME.split(text)
    names = pieces[1::2]
    if len(set(names)) < len(names):
        raise ValueError(f"a statement is named twice: {sorted(n for n in set(names) if names.count(n) > 1)}")
    return {name: _bare(body) for name, body in zip(names, pieces[2::2], strict=True)}


def _bare(body: str) -> str:
    return "\n".join(line for line in body.strip().splitlines() if not line.startswith("--"))


def statements(package: str) -> dict[str, str]:
    """The named statements of the package's ``statements.sql``."""
    return load((resources.files(package) / "statements.sql").read_text())


def migrations(package: str) -> list[str]:
    """The scripts in the package's ``migrations``, in order of their names."""
    folder = resources.files(package) / "migrations"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [(folder / name).read_text() for name in names]
