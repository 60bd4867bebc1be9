"""SQL lives in source files; each statement is named and described there. This reads them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files


def script(path: str) -> str:
    """A whole file under ``work/sql``."""
    return files("holdfast.work").joinpath("sql", path).read_text()


def statements(path: str) -> Mapping[str, str]:
    """The statements of a file by name; each begins with a line ``-- name: …``."""
    found: dict[str, str] = {}
    for part in script(path).split("-- name: ")[1:]:
        name, _, text = part.partition("\n")
        lines = [line for line in text.splitlines() if not line.startswith("--")]
        found[name.strip()] = "\n".join(lines).strip()
    return found
