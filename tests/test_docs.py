"""The documentation is true: links lead somewhere, commands and metrics exist.

Generated pages are compared by tests/unit/test_generated_pages.py, commands of guides
run by tests/integration/test_guides.py.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from holdfast import telemetry
from holdfast.access.tokens import TokenSettings
from holdfast.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
COMMAND: Any = typer.main.get_command(app)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# What a page must not contain: paths of one machine, and promises instead of facts.
FORBIDDEN = [r"/root/", r"/home/(?!you\b)", r"\bTODO\b", r"\bFIXME\b", r"\bcoming soon\b"]

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def metrics_page() -> Any:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("metrics_page")
    finally:
        sys.path.pop(0)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    bare = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in bare}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_link_leads_to_an_existing_page_and_heading(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name_of(page)} links to {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_has_no_machine_path_and_no_empty_promise(page: Path) -> None:
    text = page.read_text()
    for word in FORBIDDEN:
        assert not (found := re.search(word, text, re.IGNORECASE)), (
            f"{name_of(page)}: {found.group()}"
        )


def commands_in(text: str) -> Iterator[list[str]]:
    """Every ``holdfast …`` of a page: in blocks, after a prompt, between backticks."""
    for language, block in FENCE.findall(text):
        if language in ("sh", "text", "console", ""):
            joined = re.sub(r"\\\n\s*", " ", block)
            for line in joined.splitlines():
                yield from _commands_of_line(line)
    for quoted in re.findall(r"`(holdfast [^`]+)`", FENCE.sub("", text)):
        yield from _commands_of_line(quoted)


def _commands_of_line(line: str) -> Iterator[list[str]]:
    for found in re.finditer(
        r"(?:^|[|&;(] ?|\$ |bin/)holdfast ((?:[^|&;()]|\$\([^)]*\))*)", line.strip()
    ):
        try:
            words = shlex.split(found.group(1).split("    ")[0], comments=True)
        except ValueError:
            continue
        if words:
            yield words


def complaint_about(words: list[str]) -> str | None:
    """What is wrong with a command, by the program's own tree of commands."""
    command, path = COMMAND, "holdfast"
    options = _options(command)
    rest = list(words)
    while rest and hasattr(command, "commands"):
        word = rest.pop(0)
        if word.startswith("-"):
            if word.split("=")[0] not in options:
                return f"{path} has no option {word}"
            continue
        found = command.commands.get(word)
        if found is None:
            return f"{path} has no command {word}"
        command, path = found, f"{path} {word}"
        options = _options(command)
    for word in rest:
        if re.match(r"--?[a-z]", word) and word.split("=")[0] not in options:
            return f"{path} has no option {word}"
    return None


def _options(command: Any) -> set[str]:
    named = {
        name for parameter in command.params for name in parameter.opts if name.startswith("-")
    }
    return named | {"-h", "--help"}


def test_check_of_commands_finds_unknown_commands_and_options() -> None:
    assert complaint_about(["chat", "inspect", "chat_1"]) is None
    assert complaint_about(["chat", "explode"]) == "holdfast chat has no command explode"
    assert complaint_about(["status", "--loud"]) == "holdfast status has no option --loud"
    shown = (
        "Say `holdfast chat ls`.\n```sh\ndate | holdfast chat send lobby - --user a \\\n  --key"
        " k\n```\n"
    )
    assert list(commands_in(shown)) == [
        ["chat", "send", "lobby", "-", "--user", "a", "--key", "k"],
        ["chat", "ls"],
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "cli.md"], ids=name_of)
def test_command_on_a_page_exists(page: Path) -> None:
    wrong = [
        found
        for words in commands_in(page.read_text())
        if (found := complaint_about(words)) is not None
    ]
    assert not wrong, f"{name_of(page)}: {wrong}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_metric_on_a_page_exists(page: Path) -> None:
    shown = {
        sample
        for metric in telemetry.REGISTRY.collect()
        for suffix in ("", "_total", "_count", "_sum", "_bucket")
        for sample in [metric.name + suffix]
    }
    named = set(re.findall(r"\bholdfast_[a-z_]+[a-z]\b(?!/|\.py)", page.read_text()))
    # a claim, and schemas of PostgreSQL
    named -= {TokenSettings().scope_claim, "holdfast_work", "holdfast_chats", "holdfast_cluster"}
    assert named <= shown, f"{name_of(page)}: {named - shown}"


def test_labels_of_metrics_are_closed_sets() -> None:
    """Never a user, a chat or a token."""
    allowed = {
        "reason", "sign", "status", "part", "path", "outcome", "ended", "dependency", "state",
        "kind", "endpoint", "use", "decided_by", "decision", "by", "operation", "error", "attempt",
        "pool", "provider",  # names in the settings
        "since", "layer", "cause", "surface", "end", "severity", "answer", "step",
    }  # fmt: skip
    by_metric = metrics_page()._labels()
    labels = {label for names in by_metric.values() for label in names}
    assert labels <= allowed, f"is this a closed set? {labels - allowed}"
    assert {metric.name for metric in telemetry.REGISTRY.collect()} == set(by_metric)


def test_test_named_on_a_page_exists() -> None:
    texts = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for page in [ROOT / "README.md", *(ROOT / "docs/internals").glob("*.md")]:
        for test in re.findall(r"`(test_\w+)`", page.read_text()):
            known = f"def {test}(" in texts or list((ROOT / "tests").rglob(f"{test}.py"))
            assert known, f"{name_of(page)} names {test}, which does not exist"


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "decisions").glob("0*.md")), ids=lambda page: page.stem
)
def test_decision_has_its_sections_in_order(page: Path) -> None:
    sections = re.findall(r"^\*\*([\w ]+)\.\*\*", page.read_text(), re.MULTILINE)
    assert [name for name in sections if name != "Proof"] == [
        "Situation",
        "Decision",
        "Cost",
        "What would change it",
    ]


def test_index_links_every_page() -> None:
    index = ROOT / "docs/README.md"
    linked = {
        (index.parent / target.partition("#")[0]).resolve()
        for target in LINK.findall(index.read_text())
    }
    behind = {"decisions", "runbooks"}  # these have an index of their own
    missing = [
        name_of(page)
        for page in (ROOT / "docs").rglob("*.md")
        if page not in linked and page != index and page.parent.name not in behind
    ]
    assert not missing, f"docs/README.md does not link {missing}"


ON_A_COMMAND_LINE = re.compile(
    r"--token[ =](?!<str>)|-H [\"']?Authorization|Bearer (\$|\"\$)|curl [^\n]*hf_(admin|tenant)_"
)


def test_check_of_credentials_finds_them_on_a_command_line() -> None:
    for line in (
        "holdfast status --token hf_admin_x",
        'curl -H "Authorization: Bearer $KEY" http://x/',
        "--token=$T",
    ):
        assert ON_A_COMMAND_LINE.search(line), line
    assert not ON_A_COMMAND_LINE.search(
        "holdfast status --token-file admin.key; curl -H @auth.txt http://x/"
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_example_puts_a_key_on_a_command_line(page: Path) -> None:
    """Every user of the machine can read it there."""
    for block in re.findall(
        r"^ *```(?:sh|text|bash)?\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        assert not (found := ON_A_COMMAND_LINE.search(block)), (
            f"{name_of(page)}: {found.group() if found else ''}"
        )
