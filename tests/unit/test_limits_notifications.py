"""How long what a doorbell told is believed."""

from __future__ import annotations

from holdfast.limits.feed import HEARSAY_SECONDS, PendingNotifications

LONG = HEARSAY_SECONDS + 1


def test_what_the_log_shows_is_never_overdue() -> None:
    hearsay = PendingNotifications()
    hearsay.heard((1, 5), (1, 4), now=0)
    assert not hearsay.overdue((1, 5), known_at=LONG, now=LONG)
    assert not hearsay.overdue((1, 5), known_at=9 * LONG, now=9 * LONG)
    assert not PendingNotifications().overdue((1, 5), LONG, LONG), "nothing was heard"


def test_what_it_does_not_show_is_overdue_when_the_reader_knows_of_a_minute_more() -> None:
    for place in ((1, 5), (2, 1)):
        hearsay = PendingNotifications()
        hearsay.heard(place, (1, 4), now=0)
        assert not hearsay.overdue((1, 4), known_at=HEARSAY_SECONDS, now=LONG)
        assert not hearsay.overdue((1, 4), known_at=1, now=9 * LONG), (
            "a reader that lags need not know it"
        )
        assert hearsay.overdue((1, 4), known_at=LONG, now=LONG)


def test_rings_that_go_on_neither_put_the_day_off_nor_bring_it_nearer() -> None:
    false, true = PendingNotifications(), PendingNotifications()
    for second in range(int(LONG) + 1):
        false.heard((1, 5 + second), (1, 4), now=second)
        true.heard((1, 5 + second), (1, second), now=second)
        assert not true.overdue((1, 3 + second), known_at=second, now=second), (
            "always two behind, and never for long"
        )
    assert false.overdue((1, 4), LONG, LONG)


def test_a_newer_epoch_of_the_log_confirms_or_drops_what_was_heard_of_the_old_one() -> None:
    hearsay = PendingNotifications()
    hearsay.heard((1, 9), (1, 4), now=0)
    assert (hearsay.seq(1), hearsay.seq(2)) == (9, 0)
    assert not hearsay.overdue((2, 3), LONG, LONG)


def test_what_is_forgotten_is_not_awaited() -> None:
    hearsay = PendingNotifications()
    hearsay.heard((7, 9), (1, 4), now=0)
    hearsay.forget((1, 4))
    assert (hearsay.last, hearsay.overdue((1, 4), LONG, LONG)) == ((1, 4), False)
