"""What an idle session weighs. A whole idle connection has 16 KB; the session is the
smaller part of it.
"""

from __future__ import annotations

import gc
import random
import tracemalloc

from session_driver import AS_ANN, AT, page, sync

from holdfast.message import Cursor
from holdfast.session.effects import Fetch
from holdfast.session.session import Session
from holdfast.session.settings import SessionSettings
from holdfast.wire.frames import HeartbeatAck

SESSIONS = 500
LIMITS = SessionSettings()
CHATS = [f"chat_{n:026d}" for n in range(3)]


def idle_session(number: int, rng: random.Random) -> Session:
    """Established, live in three chats, a few heartbeats old: what most connections are
    most of the time.
    """
    now = float(number)
    session = Session(LIMITS, f"conn_{number:026d}", AS_ANN, "phone", now, now + 3600.5, rng)
    session.establish({chat_id: Cursor(1, 1000 + number) for chat_id in CHATS}, AT)
    for chat_id in CHATS:
        (fetch,) = session.receive(sync(1000 + number, chat_id=chat_id), now)
        assert isinstance(fetch, Fetch)
        session.on_page(fetch.token, page(1000 + number, 1000 + number, chat_id=chat_id), now)
        session.take(1 << 20)
        session.on_written(now)
    for beat in range(1, 4):
        session.tick(now + 30 * beat)
        session.take(1 << 20)
        session.receive(HeartbeatAck(), now + 30 * beat + 0.5)
    assert not session.closed
    assert session.waiting_bytes == 0
    return session


def test_an_idle_session_with_three_chats_is_below_three_kilobytes() -> None:
    rng = random.Random(1)
    idle_session(0, rng)
    gc.collect()
    tracemalloc.start()
    try:
        sessions = [idle_session(number, rng) for number in range(SESSIONS)]
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(sessions) == SESSIONS
    assert size / SESSIONS < 3 * 1024, f"{size / SESSIONS:.0f} bytes"
