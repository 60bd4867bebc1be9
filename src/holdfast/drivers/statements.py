"""Reads the SQL of an adapter from the files of its package.

The layout is the same for every technology:

``statements.sql``       each statement, named and described
``migrations/NNNN.sql``  the schema; the n-th file leads to version n
``functions/*.sql``      functions in the database, replaced with every version
"""

from __future__ import annotations

import re
from importlib import resources

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def statements(package: str) -> dict[str, str]:
    """Name → statement, without its comments. ValueError if a name is there twice."""
    pieces = _NAME.split((resources.files(package) / "statements.sql").read_text())
    names = pieces[1::2]
    if len(set(names)) < len(names):
        raise ValueError(
            f"a statement is named twice: {sorted(n for n in set(names) if names.count(n) > 1)}"
        )
    return {name: _bare(body) for name, body in zip(names, pieces[2::2], strict=True)}


def _bare(body: str) -> str:
    return "\n".join(line for line in body.strip().splitlines() if not line.startswith("--"))


def migrations(package: str) -> list[str]:
    """The n-th makes version n. ValueError if one is missing or misnamed."""
    scripts = _scripts(package, "migrations")
    if list(scripts) != [f"{version:04}.sql" for version in range(1, len(scripts) + 1)]:
        raise ValueError(
            f"the migrations of {package} are not 0001.sql, 0002.sql and so on:"
            f" {', '.join(scripts)}"
        )
    return list(scripts.values())


def functions(package: str) -> list[str]:
    """In order of their names."""
    return list(_scripts(package, "functions").values())


def _scripts(package: str, folder: str) -> dict[str, str]:
    files = {
        file.name: file
        for file in (resources.files(package) / folder).iterdir()
        if file.name.endswith(".sql")
    }
    return {name: files[name].read_text() for name in sorted(files)}
