"""SQL lives in source files; each statement is named and described there. This reads those of work."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from holdfast.sqlite.statements import load


def script(path: str) -> str:
    """A whole file under ``work/sql``."""
    return files("holdfast.work").joinpath("sql", path).read_text()


def statements(path: str) -> Mapping[str, str]:
    """The statements of a file by name."""
    return load(script(path))
