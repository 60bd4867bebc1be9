"""Which server a node of a cluster uses after a failover."""

from __future__ import annotations

from holdfast.store.postgres.identity import EpochBase, SeenServers, ServerIdentity

FIRST, SECOND, THIRD = (ServerIdentity("system", timeline) for timeline in (1, 2, 3))


def used(server: ServerIdentity, base: int = 0) -> SeenServers:
    seen = SeenServers()
    assert seen.judge(server, EpochBase(server, base)) == "same"
    seen.on_used(base)
    return seen


def test_promoted_server_is_adopted_first() -> None:
    assert used(FIRST).judge(SECOND, EpochBase(FIRST, 0)) == "changed"


def test_old_primary_is_refused_although_the_new_one_could_not_be_adopted_yet() -> None:
    """It may wait for its first standby, while the old one is back."""
    seen = used(FIRST)
    assert seen.judge(SECOND, EpochBase(FIRST, 0)) == "changed"
    assert seen.judge(FIRST, EpochBase(FIRST, 0)) == "old"


def test_old_primary_that_nobody_adopted_is_not_adopted_later() -> None:
    seen = used(THIRD)
    assert seen.judge(SECOND, EpochBase(FIRST, 0)) == "old"


def test_lower_base_is_an_old_state_of_the_database() -> None:
    assert used(FIRST, base=7).judge(FIRST, EpochBase(FIRST, 6)) == "old"


def test_another_system_is_adopted_whatever_its_timeline() -> None:
    restored = ServerIdentity("restored", 1)
    assert used(SECOND).judge(restored, EpochBase(SECOND, 0)) == "changed"


def test_what_was_read_and_is_not_in_the_log_is_lost() -> None:
    seen = used(FIRST, base=7)
    seen.on_read(7, {0: 512, 1: 1024})
    seen.on_read(7, {1: 512})
    assert not seen.is_lost([512, 1024])
    assert seen.is_lost([512, 1023])
    seen.on_read(6, {0: 2048})
    assert not seen.is_lost([512, 1024]), "a position of another base"
    seen.on_used(8)
    assert not seen.is_lost([0, 0]), "positions are given again under another base"
