"""Finds the view of a path: exact paths in a dictionary, then patterns. (Pure.)"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

T = TypeVar("T")
_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")


class Routes(Generic[T]):
    """Maps paths to views. ``{name}`` matches one segment, ``{name:path}`` the rest."""

    def __init__(self, by_path: Mapping[str, T]) -> None:
        self._exact = {path: found for path, found in by_path.items() if "{" not in path}
        self._patterns = [(_pattern(path), found) for path, found in by_path.items() if "{" in path]

    def find(self, path: str) -> tuple[T, Mapping[str, str]] | None:
        """The view of a path and its parameters; None if there is none."""
        exact = self._exact.get(path)
        if exact is not None:
            return exact, {}
        for pattern, found in self._patterns:
            if match := pattern.fullmatch(path):
                return found, match.groupdict()
        return None


def _pattern(path: str) -> re.Pattern[str]:
    pieces, at = [], 0
    for parameter in _PARAMETER.finditer(path):
        pieces.append(re.escape(path[at : parameter.start()]))
        pieces.append(f"(?P<{parameter[1]}>{'.*' if parameter[2] else '[^/]+'})")
        at = parameter.end()
    return re.compile("".join(pieces) + re.escape(path[at:]), re.DOTALL)
