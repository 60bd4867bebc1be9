"""What ``holdfast jobs replay`` asks for in each second."""

from __future__ import annotations

from holdfast.cli.jobs import _portions


def test_every_named_dead_letter_is_replayed_oldest_first_within_the_rate() -> None:
    assert list(_portions([5, 1, 4, 2, 3], 2, dead=9)) == [{"seqs": [1, 2]}, {"seqs": [3, 4]}, {"seqs": [5]}]


def test_what_dies_again_is_not_replayed_for_ever() -> None:
    assert list(_portions(None, 2, dead=5)) == [{"limit": 2}, {"limit": 2}, {"limit": 1}]


def test_where_nothing_is_dead_the_server_is_asked_and_says_so() -> None:
    assert list(_portions(None, 2, dead=0)) == [{}]
