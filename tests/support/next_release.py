"""A simulated next release: one more migration of the chats, which adds a column, and a
routine ``append_2``, which fills it.
"""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path

from program import ROOT

from holdfast import __version__
from holdfast.store.postgres.schema import SCHEMA, SchemaScripts

VERSION = "999.0.0"
MIGRATION = "ALTER TABLE holdfast_chats.message ADD COLUMN release integer NOT NULL DEFAULT 1;"


def append_2() -> str:
    """As ``append_1``; the new column says which release wrote the message."""
    columns = "content_hash, message_id, content, content_type"
    values = "f.hash, f.message_id, f.content, f.content_type"
    return _changed(
        (resources.files("holdfast.store.postgres") / "functions" / "append.sql").read_text(),
        ("append_1", "append_2"),
        ("append_and_commit_1", "append_and_commit_2"),
        (f"{columns})", f"{columns}, release)"),
        (f"{values}\n", f"{values}, 2\n"),
    )


def next_schema() -> SchemaScripts:
    return SchemaScripts([*SCHEMA.migrations, MIGRATION], [*SCHEMA.functions, append_2()])


def write_next_release(folder: Path) -> Path:
    """The program of the next release, for PYTHONPATH. It never calls ``append_1``."""
    package = folder / "holdfast"
    shutil.copytree(
        ROOT / "src" / "holdfast", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    main, store = package / "__init__.py", package / "store" / "postgres"
    main.write_text(_changed(main.read_text(), (f'"{__version__}"', f'"{VERSION}"')))
    (store / "migrations" / f"{SCHEMA.version + 1:04}.sql").write_text(MIGRATION)
    (store / "functions" / "append_2.sql").write_text(append_2())
    statements = store / "statements.sql"
    statements.write_text(
        _changed(statements.read_text(), ("append_and_commit_1(", "append_and_commit_2("))
    )
    return folder


def _changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text, f"{old!r} is not there any more: this release has changed"
        text = text.replace(old, new)
    return text
