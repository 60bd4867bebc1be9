"""How command groups are made: all alike, with ``list`` accepted for ``ls``."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

_ALIASES = {"list": "ls"}
"""Accepted spelling -> the command's name.

Help and documentation have the name only.
"""


class _Group(TyperGroup):
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or super().get_command(
            ctx, _ALIASES.get(cmd_name, cmd_name)
        )


def group(about: str) -> typer.Typer:
    return typer.Typer(cls=_Group, no_args_is_help=True, help=about, rich_markup_mode=None)
