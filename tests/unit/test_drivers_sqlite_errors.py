"""SQLite's errors on their way to clients; the store's contract has the whole list."""

from __future__ import annotations

import apsw
import pytest
from structlog.testing import capture_logs

from holdfast.drivers.sqlite.errors import MEANINGS, Doing, translate
from holdfast.errors import DiskFull

FILE = "/var/lib/holdfast/chats.db"
KINDS = [apsw.SQLError, *(kind for meaning in MEANINGS for kind in meaning.errors)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("doing", [Doing.WORKING, Doing.COMMITTING])
def test_clients_learn_neither_the_file_nor_the_librarys_words_and_the_log_has_both(
    kind: type[apsw.Error], doing: Doing
) -> None:
    with capture_logs() as logs:
        found = translate(kind("no such table: secrets"), FILE, doing)
    assert FILE not in found.message and "secrets" not in found.message and not found.details
    assert logs[0]["file"] == FILE and "no such table" in logs[0]["cause"]


def test_a_disk_without_room_has_an_error_of_its_own() -> None:
    found = translate(apsw.FullError("database or disk is full"), FILE, Doing.OPENING)
    assert (
        isinstance(found, DiskFull) and FILE in found.message and "free some space" in found.message
    )
