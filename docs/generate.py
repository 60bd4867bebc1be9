"""Writes the reference pages that are made from the code: ``python docs/generate.py``.

A page is a function that returns its text; a test compares each with the file, so that
none can go stale.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

REFERENCE = Path(__file__).resolve().parent / "reference"


def cli_page() -> str:
    """Every command's own help, in the order of ``holdfast --help``."""
    parts = [
        "# The command line\n",
        "Made from the program's own help by `python docs/generate.py`; do not edit.\n",
        (
            "Exit codes: 0 done; 1 refused or failed, with a sentence on stderr that says what to"
            " do; 2 the command was not understood. With `--json` results are JSON on stdout and"
            " errors JSON on stderr. The options under `--url` may stand before or after the"
            " command.\n"
        ),
    ]
    for words in commands():
        parts.append(f"## holdfast {' '.join(words)}".rstrip() + "\n")
        parts.append(f"```text\n{help_of(words)}```\n")
    return "\n".join(parts)


def rest_page() -> str:
    """Every endpoint, from the table of them."""
    from holdfast.api.reference import markdown_page
    from holdfast.api.routes import GROUPS

    return markdown_page(GROUPS)


def commands() -> Iterator[tuple[str, ...]]:
    """The words of every command, groups before their members."""
    from holdfast.cli.app import app

    yield ()
    for command in app.registered_commands:
        yield (_name(command.name, command.callback),)
    for group in app.registered_groups:
        assert group.name and group.typer_instance
        yield (group.name,)
        for command in group.typer_instance.registered_commands:
            yield (group.name, _name(command.name, command.callback))


def help_of(words: tuple[str, ...]) -> str:
    from typer.testing import CliRunner

    from holdfast.cli.app import app

    os.environ["COLUMNS"] = "100"
    return CliRunner().invoke(app, [*words, "--help"], prog_name="holdfast").stdout


def _name(name: str | None, callback: Callable[..., object] | None) -> str:
    assert callback is not None
    return name or callback.__name__.replace("_", "-")


def _page_of(module: str) -> Callable[[], str]:
    """The ``page`` of a module beside this one."""

    def write() -> str:
        if str(REFERENCE.parent) not in sys.path:
            sys.path.insert(0, str(REFERENCE.parent))
        text: str = importlib.import_module(module).page()
        return text

    return write


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "metrics.md": _page_of("metrics_page"),
    "protocol.md": _page_of("protocol_page"),
    "rest.md": rest_page,
    "settings.md": _page_of("settings_page"),
}


def main() -> None:
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())


if __name__ == "__main__":
    main()
