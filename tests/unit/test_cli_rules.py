"""What the commands about rules do when the server says: not now."""

from __future__ import annotations

import pytest

from holdfast.cli.rules import requests
from holdfast.errors import RateLimited


def test_unreadable_rule_is_marked_in_lists() -> None:
    rule = {
        "precision": "strict",
        "onStoreFailure": "local_share",
        "mode": "of_next_year",
        "deleted": False,
    }
    assert requests.besides({**rule, "unreadable": "why"}) == "unreadable, of_next_year"


def test_short_wait_is_waited_out_and_a_long_one_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(requests.time, "sleep", waited.append)
    refusals = [2.0, 366 * 86_400.0]

    def ask() -> None:
        raise RateLimited("too many", retry_after_seconds=refusals.pop(0))

    with pytest.raises(RateLimited):
        requests.patiently(ask)
    assert waited == [2.0]
