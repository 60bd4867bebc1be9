"""A saved history is the history."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.message import Cursor, Message, Page
from holdfast.verify.history import (
    Header,
    Ok,
    PageSeen,
    Recorder,
    Unknown,
    decode,
    digest,
    encode,
    load,
)


def test_a_saved_history_is_loaded_as_it_was(tmp_path: Path) -> None:
    record = Recorder(Header(seed=7, notes={"clients": 3}))
    op = record.invoke(1.5, "A", "resume", cursors={"c": Cursor(1, 4)})
    hello = Message("msg_1", "c", 5, "text", "ann", "k", "hello", "text/plain", "now")
    record.note(
        Ok(at=2.0, op=op, pages=[PageSeen.of(Page("c", 1, [hello], 5, False, 5), Cursor(1, 4))])
    )
    late = record.invoke(2.5, "A", "send", "c", key="k2", digest=digest("x", "text/plain"))
    record.note(Unknown(at=9.0, op=late, reason="timeout"))
    path = tmp_path / "history.jsonl"
    record.save(path)

    assert load(path).events == record.events
    assert len(path.read_text().splitlines()) == 5
    assert "hello" not in path.read_text()  # contents stay private


@pytest.mark.parametrize(
    "damage",
    [b"", b"not json\n", b'{"event":"ok","op":1}\n', b'{"event":"header","version":2}\n'],
)
def test_file_that_is_no_history_is_refused(damage: bytes) -> None:
    with pytest.raises(ValueError, match="history"):
        decode(damage)


def test_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match="history"):
        decode(encode([Header()]) + b'{"event":"ok","op":1,"surprise":true}\n')
