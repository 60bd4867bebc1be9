"""What the SQLite store alone reaches: acknowledged sends per second by group size, on the real path.

    python bench/store.py [--seconds 2] [--groups 1,16,128,512] [--busy] [--json]

Key check, membership, counter and message insert, synchronous=FULL. ``--busy`` runs it beside a thread that never
gives up the interpreter by itself, as a saturated event loop would be. CPU is that of the process per send.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import threading
import time
from pathlib import Path

from holdfast.message import Acked, Draft, User
from holdfast.store.changes import Act, CreateChat
from holdfast.store.sqlite import SqliteStore

CHATS = 200
MEMBERS = 20


def drafts(rng: random.Random, count: int) -> list[Draft]:
    made = []
    for _ in range(count):
        chat = rng.randrange(CHATS)
        sender = User("default", f"user_{chat}_{rng.randrange(MEMBERS)}")
        key = f"{rng.getrandbits(128):032x}"
        text = "a message of a usual length, a little more than a hundred characters, as people write them in a chat"
        made.append(
            Draft(sender, f"chat_{chat}", key, text, "text/plain", "msg_" + key[:26], "2026-01-01T00:00:00.000Z")
        )
    return made


async def sends_per_second(directory: Path, group: int, seconds: float) -> dict[str, float]:
    rng = random.Random(group)
    async with SqliteStore(directory / f"{group}.db") as store:
        for chat in range(CHATS):
            owner = User("default", f"user_{chat}_0")
            members = [f"user_{chat}_{n}" for n in range(1, MEMBERS)]
            await store.change(CreateChat(Act(owner, "", ""), f"chat_{chat}", "group", "bench", members))
        prepared = [drafts(rng, group) for _ in range(max(20, int(seconds * 100_000 / group)))]
        began, cpu, done = time.perf_counter(), time.process_time(), 0
        for each in prepared:
            outcomes = await store.append(each)
            assert all(isinstance(outcome, Acked) for outcome in outcomes)
            done += group
            if time.perf_counter() - began > seconds:
                break
        took, used = time.perf_counter() - began, time.process_time() - cpu
    return {"group": group, "sends_per_second": round(done / took), "cpu_us_per_send": round(used / done * 1e6, 1)}


def measure(group: int, seconds: float) -> dict[str, float]:
    """The figures of one group size, in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(sends_per_second(Path(directory), group, seconds))


def spin(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--groups", default="1,16,128,512")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    stop = threading.Event()
    if args.busy:
        threading.Thread(target=spin, args=(stop,), daemon=True).start()
    rows = [measure(int(group), args.seconds) for group in args.groups.split(",")]
    stop.set()
    for row in rows:
        print(json.dumps(row) if args.json else "  ".join(f"{name} {value:>8}" for name, value in row.items()))


if __name__ == "__main__":
    main()
