"""Writes the files that are made from the code: ``python docs/generate.py``.

A file is a function that returns its text; a test compares each with what is there, so
that none can go stale.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def cli_page() -> str:
    """Every command's own help, in the order of ``holdfast --help``."""
    parts = [
        "# The command line\n",
        "Made from the program's own help by `python docs/generate.py`; do not edit.\n",
        (
            "Exit codes: 0 done; 1 refused or failed, with a sentence on stderr that says what to"
            " do; 2 the command was not understood. With `--json` results are JSON on stdout and"
            " errors JSON on stderr.\n"
        ),
        "## Shared options\n",
        (
            "Almost every command takes them, before or after its name; its section says which. A"
            " command that contacts no server does not take `--url` and the tokens.\n"
        ),
        f"```text\n{shared_options()}```\n",
    ]
    for words in commands():
        text, shared = help_of(words)
        parts.append(f"## holdfast {' '.join(words)}".rstrip() + "\n")
        parts.append(f"```text\n{text}```\n")
        if shared:
            names = ", ".join(f"`{name}`" for name in shared)
            parts.append(f"Also the [shared options](#shared-options) {names}.\n")
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


def help_of(words: tuple[str, ...]) -> tuple[str, list[str]]:
    """A command's help without the shared options, and the names of these."""
    from click import Context
    from typer.main import get_command

    from holdfast.cli.context import SERVER

    os.environ["COLUMNS"] = "100"
    command: Any = get_command(app := _app())
    context = Context(command, info_name="holdfast", **app.info.context_settings)
    for word in words:
        command = command.get_command(context, word)
        context = Context(command, info_name=word, parent=context)
    shared = [each for each in command.params if getattr(each, "rich_help_panel", "") == SERVER]
    for option in shared:
        option.hidden = True
    return f"{command.get_help(context)}\n", [max(each.opts, key=len) for each in shared]


def shared_options() -> str:
    """The shared options, from a command that has no others."""
    from typer.testing import CliRunner

    os.environ["COLUMNS"] = "100"
    text = CliRunner().invoke(_app(), ["status", "--help"], prog_name="holdfast").stdout
    options = text.partition("Options:\n")[2]
    return "".join(
        line for line in options.splitlines(keepends=True) if not line.startswith("  -h, --help")
    )


def _app() -> Any:
    from holdfast.cli.app import app

    return app


def _name(name: str | None, callback: Callable[..., object] | None) -> str:
    assert callback is not None
    return name or callback.__name__.replace("_", "-")


def _page_of(module: str, function: str = "page") -> Callable[[], str]:
    """What a function of a module beside this one returns."""

    def write() -> str:
        text: str = getattr(_beside(module), function)()
        return text

    return write


def _wrapped(page: Callable[[], str]) -> Callable[[], str]:
    def write() -> str:
        text: str = _beside("wrapping").wrapped(page())
        return text

    return write


def _beside(module: str) -> ModuleType:
    """A module of this folder, also when the caller is elsewhere."""
    if str(ROOT / "docs") not in sys.path:
        sys.path.insert(0, str(ROOT / "docs"))
    return importlib.import_module(module)


PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/alerts.md": _wrapped(_page_of("alerts_page")),
    "docs/reference/cli.md": _wrapped(cli_page),
    "docs/reference/metrics.md": _wrapped(_page_of("metrics_page")),
    "docs/reference/protocol.md": _wrapped(_page_of("protocol_page")),
    "docs/reference/rest.md": _wrapped(rest_page),
    "docs/reference/settings.md": _wrapped(_page_of("settings_page")),
    "deploy/grafana/holdfast.json": _page_of("dashboard"),
    "deploy/prometheus/rules.yml": _page_of("prometheus_rules", "rules_file"),
    "deploy/prometheus/rules_test.yml": _page_of("prometheus_rules", "tests_file"),
}


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / name).write_text(page())


if __name__ == "__main__":
    main()
