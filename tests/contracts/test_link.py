"""What every link to gateways promises; a bench connects them through the adapter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scripted_durability import ANNA

from holdfast.errors import Unavailable
from holdfast.fanout.contract import Envelope, Link, MessageRun
from holdfast.fanout.memory import LocalLink
from holdfast.message import Message

Connect = Callable[[str, Callable[[Envelope], None]], None]
Bench = tuple[Link, Connect, Callable[[str], None]]


def local() -> Bench:
    link = LocalLink()
    return link, link.connect, link.disconnect


ADAPTERS = {"local": local}


@pytest.fixture(params=ADAPTERS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return ADAPTERS[request.param]()


def envelope(*sequences: int) -> Envelope:
    messages = [
        Message(f"msg_{n}", "c", n, "text", "anna", None, "hi", "text/plain", "now")
        for n in sequences
    ]
    return Envelope([MessageRun("default", messages, frozenset({ANNA}))])


async def test_an_envelope_reaches_the_gateway_it_names_whole_and_in_order(bench: Bench) -> None:
    link, connect, _ = bench
    got: dict[str, list[Envelope]] = {"east": [], "west": []}
    for name, received in got.items():
        connect(name, received.append)

    await link.deliver("east", envelope(1, 2))
    await link.deliver("east", envelope(3))
    await link.deliver("west", envelope(4))
    assert got == {"east": [envelope(1, 2), envelope(3)], "west": [envelope(4)]}


async def test_a_gateway_that_is_not_there_is_unavailable(bench: Bench) -> None:
    link, connect, disconnect = bench
    connect("east", lambda envelope: None)
    disconnect("east")
    disconnect("east")
    for name in ("east", "never"):
        with pytest.raises(Unavailable):
            await link.deliver(name, envelope(1))


async def test_a_gateway_that_breaks_is_unavailable_and_nothing_foreign_comes_out(
    bench: Bench,
) -> None:
    link, connect, _ = bench

    def broken(envelope: Envelope) -> None:
        raise ZeroDivisionError("a defect in a session")

    connect("east", broken)
    with pytest.raises(Unavailable):
        await link.deliver("east", envelope(1))
