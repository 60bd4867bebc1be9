"""Files that are replaced in one step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.access.secrets import write_keys
from holdfast.drivers.files import replace_file
from holdfast.limits.snapshot_file import SavedNodes, save_nodes


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_keys(path, []),
        lambda path: save_nodes(path, SavedNodes(3)),
        lambda path: replace_file(path, b"{}", modified_at=1_700_000_000.0),
    ],
    ids=["keys", "limits", "any"],
)
def test_a_replaced_file_is_private_and_both_it_and_its_name_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object
) -> None:
    synced: list[int] = []
    really = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), really(fd)))
    path = tmp_path / "kept.json"
    path.write_text("old")
    path.chmod(0o644)
    write(path)  # type: ignore[operator]
    assert path.stat().st_mode & 0o777 == 0o600
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]
    assert [p.name for p in tmp_path.iterdir()] == ["kept.json"]


def test_a_file_shows_the_time_it_is_given(tmp_path: Path) -> None:
    replace_file(tmp_path / "a", b"x", modified_at=1_700_000_000.0)
    assert (tmp_path / "a").stat().st_mtime == 1_700_000_000.0


def test_a_disk_that_refuses_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
