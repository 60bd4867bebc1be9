"""What the SQLite store alone reaches: acknowledged sends per second by group size, on
the real path.

    python bench/store.py [--quick] [--json] [--only alone,busy]

Key check, membership, counter and message insert, synchronous=FULL. ``busy`` runs it
beside a thread that never gives up the interpreter by itself, as a saturated event loop
would be. CPU is that of the process per send.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import arguments, finish
from holdfast.message import Acked, Draft, User
from holdfast.store.commands import CommandContext, CreateChat
from holdfast.store.sqlite import SqliteStore

PARTS = ("alone", "busy")
GROUPS = (1, 16, 128, 512)
CHATS = 200
MEMBERS = 20


def drafts(rng: random.Random, count: int) -> list[Draft]:
    made = []
    for _ in range(count):
        chat = rng.randrange(CHATS)
        sender = User("default", f"user_{chat}_{rng.randrange(MEMBERS)}")
        key = f"{rng.getrandbits(128):032x}"
        text = (
            "a message of a usual length, a little more than a hundred characters, as people write"
            " them in a chat"
        )
        made.append(
            Draft(
                sender,
                f"chat_{chat}",
                key,
                text,
                "text/plain",
                "msg_" + key[:26],
                "2026-01-01T00:00:00.000Z",
            )
        )
    return made


async def appended(directory: Path, group: int, seconds: float) -> tuple[float, float]:
    rng = random.Random(group)
    async with SqliteStore(directory / f"{group}.db") as store:
        for chat in range(CHATS):
            owner = User("default", f"user_{chat}_0")
            members = [f"user_{chat}_{n}" for n in range(1, MEMBERS)]
            await store.change(
                CreateChat(CommandContext(owner, "", ""), f"chat_{chat}", "group", "bench", members)
            )
        prepared = [drafts(rng, group) for _ in range(max(20, int(seconds * 100_000 / group)))]
        began, cpu, done = time.perf_counter(), time.process_time(), 0
        for each in prepared:
            outcomes = await store.append(each)
            assert all(isinstance(outcome, Acked) for outcome in outcomes)
            done += group
            if time.perf_counter() - began > seconds:
                break
        took, used = time.perf_counter() - began, time.process_time() - cpu
    return done / took, used / done * 1e6


@contextmanager
def spinning() -> Iterator[None]:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1_000))

    threading.Thread(target=spin, daemon=True).start()
    try:
        yield
    finally:
        stop.set()


def measure(group: int, seconds: float) -> tuple[float, float]:
    """Sends per second and CPU microseconds of each, in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(appended(Path(directory), group, seconds))


def figures_of(part: str, seconds: float) -> dict[str, float]:
    figures = {}
    for group in GROUPS:
        rate, cpu_us = measure(group, seconds)
        figures[f"{part}_{group}_sends_per_second"] = round(rate)
        figures[f"{part}_{group}_cpu_us_per_send"] = round(cpu_us, 1)
    return figures


def main() -> None:
    args = arguments(__doc__ or "", PARTS)
    chosen, seconds = args.only.split(","), 0.5 if args.quick else 2.0
    figures: dict[str, float] = {}
    if "alone" in chosen:
        figures |= figures_of("alone", seconds)
    if "busy" in chosen:
        with spinning():
            figures |= figures_of("busy", seconds)
    finish("store", figures, {}, as_json=args.json)


if __name__ == "__main__":
    main()
