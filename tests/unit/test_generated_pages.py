"""The generated pages are what the code says today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
_spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
assert _spec is not None and _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PAGES)
def test_the_page_is_current(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (
        "HOLDFAST_URL",
        "HOLDFAST_STATE_DIR",
        "HOLDFAST_TOKEN",
        "HOLDFAST_CONFIG",
        "COLUMNS",
    ):
        monkeypatch.delenv(variable, raising=False)
    assert (DOCS.parent / name).read_text() == generate.PAGES[name](), "run `make docs`"


def test_the_settings_page_names_types_as_a_file_has_them() -> None:
    text = (DOCS / "reference" / "settings.md").read_text()
    scopes = "list of `chats:read`, `chats:send`, `chats:create`, `chats:members`, `replies:write`"
    assert f'| `default_scopes` | {scopes} | `["chats:read", "chats:send"]` |' in text
    assert not [word for word in ("typing.", "Ellipsis", "tuple[", "('") if word in text]


def test_the_reference_holds_every_command() -> None:
    text = (DOCS / "reference" / "cli.md").read_text()
    for words in generate.commands():
        assert f"\n## holdfast {' '.join(words)}".rstrip() in text


@pytest.mark.parametrize("name", [name for name in generate.PAGES if name.endswith(".md")])
def test_prose_of_a_page_is_at_most_88_columns_wide(name: str) -> None:
    in_code = False
    for line in (DOCS.parent / name).read_text().splitlines():
        in_code ^= line.startswith("```")
        assert in_code or line.startswith("|") or len(line) <= 88, line


def test_wrapping_keeps_code_lists_and_tables_whole() -> None:
    wrapped = generate._beside("wrapping").wrapped
    row = f"| {'cell ' * 30}|"
    item = f"- {'word ' * 15}`a code of some words` and + a plus"
    assert wrapped(f"{row}\n\n{item}\n```text\n{'x ' * 60}\n```\n").splitlines() == [
        row,
        "",
        f"- {'word ' * 15}".rstrip(),
        "  `a code of some words` and + a plus",
        "```text",
        "x " * 60,
        "```",
    ]


def test_command_reference_has_the_shared_options_once() -> None:
    text = (DOCS / "reference" / "cli.md").read_text()
    assert text.count("[env var: HOLDFAST_URL]") == text.count("Print JSON.") == 1
