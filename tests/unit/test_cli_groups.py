"""All command groups have the same names for the same things."""

from __future__ import annotations

import pytest
import typer.main

from holdfast.cli.app import app

ROOT = typer.main.get_command(app)
COMMANDS = ROOT.commands  # type: ignore[attr-defined]
GROUPS = {name: group for name, group in COMMANDS.items() if hasattr(group, "commands")}


@pytest.mark.parametrize("name", GROUPS)
def test_command_that_lists_is_called_ls_and_list_is_accepted(name: str) -> None:
    group = GROUPS[name]
    assert "list" not in group.commands, "one name in help and documentation"
    if "ls" in group.commands:
        context = typer.Context(group)
        assert group.get_command(context, "list") is group.get_command(context, "ls")
        assert group.get_command(context, "lists") is None
