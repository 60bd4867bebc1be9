"""SQL out of the files of a package."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.drivers.statements import functions, migrations, statements


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of its own for each test, by the name of its folder."""
    folder = tmp_path / f"adapter_of_{tmp_path.name}"
    for name in ("migrations", "functions"):
        (folder / name).mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_a_statement_is_found_by_its_name_without_what_is_said_about_it(package: Path) -> None:
    text = (
        "-- of the whole file\n-- name: one\n-- why. $1 what\nSELECT\n  1\n\n-- name: two\nSELECT 2"
        " -- kept\n"
    )
    (package / "statements.sql").write_text(text)
    assert statements(package.name) == {"one": "SELECT\n  1", "two": "SELECT 2 -- kept"}


def test_a_name_that_is_there_twice_is_refused(package: Path) -> None:
    (package / "statements.sql").write_text("-- name: one\nSELECT 1\n-- name: one\nSELECT 2\n")
    with pytest.raises(ValueError, match="one"):
        statements(package.name)


def test_the_nth_migration_makes_version_n(package: Path) -> None:
    for version in (2, 10, 1, *range(3, 10)):
        (package / "migrations" / f"{version:04}.sql").write_text(str(version))
    assert migrations(package.name) == [str(version) for version in range(1, 11)]


@pytest.mark.parametrize(
    "names", [["0002.sql"], ["0001.sql", "0003.sql"], ["0001.sql", "2.sql"], ["0001_rules.sql"]]
)
def test_a_migration_that_would_make_another_version_than_it_says_is_refused(
    package: Path, names: list[str]
) -> None:
    for name in names:
        (package / "migrations" / name).touch()
    with pytest.raises(ValueError, match=names[-1]):
        migrations(package.name)


def test_functions_are_made_in_the_order_of_their_names(package: Path) -> None:
    for name in ("b.sql", "a.sql", "notes.md"):
        (package / "functions" / name).write_text(name)
    assert functions(package.name) == ["a.sql", "b.sql"]
