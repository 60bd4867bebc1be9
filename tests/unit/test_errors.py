"""The error tree, and from a server's answer back to a value of it."""

from __future__ import annotations

import pytest

from holdfast.errors import (
    Deferred,
    HoldfastError,
    InternalError,
    OutcomeUnknown,
    Refused,
    error_of,
)
from holdfast.wire.codec import error_payload

PUBLIC = [*Refused.__subclasses__(), *Deferred.__subclasses__(), OutcomeUnknown, InternalError]


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_what_one_side_raises_the_other_side_raises_too(kind: type[HoldfastError]) -> None:
    sent = error_payload(kind("why", retry_after_seconds=2.5, limit=7), of_send=True)
    received = error_of(
        sent.code,
        sent.message,
        outcome=sent.outcome,
        retry_after_seconds=sent.retry_after_seconds,
        details=sent.details,
    )
    assert type(received) is kind
    assert sent.retry_after_seconds == (None if kind.private else 2.5)
    assert (received.code, received.retryable, received.message) == (
        sent.code,
        sent.retryable,
        sent.message,
    )
    assert received.outcome == sent.outcome
    assert (received.retry_after_seconds, received.details) == (
        sent.retry_after_seconds,
        dict(sent.details or {}),
    )


def test_a_code_of_a_newer_server_is_named() -> None:
    assert str(error_of("OUT_OF_CHEESE", "none left")) == "OUT_OF_CHEESE: none left"
