"""The commands of an operator on one chat."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app


@pytest.mark.parametrize(
    "command",
    [
        *(("ban", "mallory", "--chat", "lobby"), ("unban", "mallory", "--chat", "lobby")),
        *(("mute", "mallory", "--chat", "lobby"), ("unmute", "mallory", "--chat", "lobby")),
        *(("chat", "inspect", "lobby"), ("chat", "halt", "lobby", "--reason", "a drill")),
        ("chat", "recover", "lobby", "--reason", "a drill"),
    ],
)
def test_operator_command_with_the_title_of_a_chat_asks_for_its_id(
    command: tuple[str, ...],
) -> None:
    done = CliRunner().invoke(
        app, [*command, "--url", "http://127.0.0.1:9", "--token", "hf_admin_x"]
    )
    assert done.exit_code == 1
    assert done.stderr == (
        "Error: 'lobby' is not a chat id: an operator names a chat by its id (chat_…),"
        " which `holdfast chat ls --user MEMBER` shows\n"
    )
