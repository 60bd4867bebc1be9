"""The error tree, and back from what a server told to a value of it."""

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

TOLD = [*Refused.__subclasses__(), *Deferred.__subclasses__(), OutcomeUnknown, InternalError]


@pytest.mark.parametrize("kind", TOLD, ids=lambda kind: kind.__name__)
def test_what_one_side_raises_the_other_side_raises_too(kind: type[HoldfastError]) -> None:
    told = error_payload(kind("why", retry_after_seconds=2.5, limit=7), of_send=True)
    heard = error_of(
        told.code,
        told.message,
        outcome=told.outcome,
        retry_after_seconds=told.retry_after_seconds,
        details=told.details,
    )
    assert type(heard) is kind
    assert told.retry_after_seconds == (None if kind.private else 2.5)
    assert (heard.code, heard.retryable, heard.message) == (told.code, told.retryable, told.message)
    assert heard.outcome == told.outcome
    assert (heard.retry_after_seconds, heard.details) == (
        told.retry_after_seconds,
        dict(told.details or {}),
    )


def test_a_code_of_a_newer_server_is_named() -> None:
    assert str(error_of("OUT_OF_CHEESE", "none left")) == "OUT_OF_CHEESE: none left"
