"""How long a notification is trusted without confirmation by the log."""

from __future__ import annotations

from holdfast.limits.feed import UNCONFIRMED_SECONDS, PendingNotifications

LONG = UNCONFIRMED_SECONDS + 1


def test_notification_in_the_log_is_never_overdue() -> None:
    pending = PendingNotifications()
    pending.add((1, 5), (1, 4), now=0)
    assert not pending.overdue((1, 5), known_at=LONG, now=LONG)
    assert not pending.overdue((1, 5), known_at=9 * LONG, now=9 * LONG)
    assert not PendingNotifications().overdue((1, 5), LONG, LONG), "nothing was announced"


def test_notification_missing_from_the_log_is_overdue_after_a_minute() -> None:
    for position in ((1, 5), (2, 1)):
        pending = PendingNotifications()
        pending.add(position, (1, 4), now=0)
        assert not pending.overdue((1, 4), known_at=UNCONFIRMED_SECONDS, now=LONG)
        assert not pending.overdue((1, 4), known_at=1, now=9 * LONG), (
            "a reader that lags need not know it"
        )
        assert pending.overdue((1, 4), known_at=LONG, now=LONG)


def test_repeated_notifications_do_not_move_the_moment_of_overdue() -> None:
    false, true = PendingNotifications(), PendingNotifications()
    for second in range(int(LONG) + 1):
        false.add((1, 5 + second), (1, 4), now=second)
        true.add((1, 5 + second), (1, second), now=second)
        assert not true.overdue((1, 3 + second), known_at=second, now=second), (
            "always two behind, and never for long"
        )
    assert false.overdue((1, 4), LONG, LONG)


def test_newer_epoch_of_the_log_ends_the_wait_for_older_notifications() -> None:
    pending = PendingNotifications()
    pending.add((1, 9), (1, 4), now=0)
    assert (pending.seq(1), pending.seq(2)) == (9, 0)
    assert not pending.overdue((2, 3), LONG, LONG)


def test_forgotten_notifications_are_not_awaited() -> None:
    pending = PendingNotifications()
    pending.add((7, 9), (1, 4), now=0)
    pending.forget((1, 4))
    assert (pending.last, pending.overdue((1, 4), LONG, LONG)) == ((1, 4), False)
