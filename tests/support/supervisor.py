"""A real server that is killed and started again, and real clients that go on by
themselves.

``Supervisor`` owns the process: start, wait until it serves, SIGKILL, start again.
``Person`` is a client that sends and keeps a copy of what it receives; whatever crosses
its wire goes into one history for the checkers.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from program import ROOT

from engines import free_port
from holdfast.access.principal import USER_SCOPES
from holdfast.access.secrets import open_secrets
from holdfast.access.tokens import Tokens, TokenSettings, shared_secret
from holdfast.client import ChatGone, ChatReset, ClientSettings, Message
from holdfast.clock import SystemClock, timestamp
from holdfast.eventlog.sqlite import SqliteEventLog
from holdfast.message import User
from holdfast.node.state_dir import held
from holdfast.store.commands import CommandContext, CreateChat
from holdfast.store.sqlite import SqliteStore
from holdfast.store.sqlite.database import CHATS
from holdfast.verify.history import FaultWindow, Recorder
from holdfast.verify.recording import RecordingClient
from proof.coverage_marks import read_marks
from proof.end_state import note_log, note_store

START_SECONDS_MAX = 90.0
"""When it will not come any more; how fast it is, is judged elsewhere."""
TENANT = "default"
LOG, MARKS, ARMED = "server.log", "marks", "armed"
QUICK = ClientSettings(
    reconnect_initial_seconds=0.02, reconnect_cap_seconds=0.1, ack_interval_seconds=0.05
)
SETTINGS = {
    "gateway.backpressure.inbound.rate_limit_per_second": 2000,
    "gateway.backpressure.inbound.work_rate_limit_per_second": 4000,
}

Settings = Mapping[str, str | int]
Start = Callable[[Settings, str, Path], "Awaitable[Life]"]
"""How a server is started: its settings, where it kills itself, the directory of its
output and its marks.
"""


class Again(NamedTuple):
    """The time from a kill until it served again, and its own processor time in it."""

    seconds: float
    cpu_seconds: float
    new_interpreter: bool


class Forks:
    """Starts servers, one at a time, by forking a process that has imported them."""

    async def __aenter__(self) -> Forks:
        self._parent = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "killable_server",
            "fork",
            env=_environment(),
            stdin=PIPE,
            stdout=PIPE,
        )
        self._life: Life | None = None
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._parent.stdin is not None
        if self._life is not None:
            await self._life.end(signal.SIGKILL)  # after a failed test: its parent waits for it
        self._parent.stdin.close()
        await self._parent.wait()

    async def start(self, settings: Settings, kill_at: str, directory: Path) -> Life:
        assert self._parent.stdin is not None
        order = {
            "settings": settings,
            "kill_at": kill_at,
            "log": str(directory / LOG),
            "marks": str(directory / MARKS),
        }
        self._parent.stdin.write(json.dumps(order).encode() + b"\n")
        self._life = Life(await self._answer("pid"), self._answer("exit"))
        return self._life

    async def _answer(self, word: str) -> int:
        assert self._parent.stdout is not None
        answered, number = (await self._parent.stdout.readline()).split()
        assert answered == word.encode()
        return int(number)


class Life:
    """One process, from its start to its end; it does not outlive a failed test."""

    def __init__(self, pid: int, ends: Coroutine[Any, Any, int]) -> None:
        self.pid = pid
        self.ended = asyncio.create_task(self._until_it(ends))

    async def _until_it(self, ends: Coroutine[Any, Any, int]) -> int:
        try:
            return await ends
        except asyncio.CancelledError:
            os.kill(self.pid, signal.SIGKILL)
            raise

    async def end(self, number: signal.Signals) -> int:
        """Send a signal unless it has ended; its exit code."""
        if not self.ended.done():
            os.kill(self.pid, number)
        return await self.ended


async def executed(
    settings: Settings, kill_at: str, directory: Path, environment: Mapping[str, str] | None = None
) -> Life:
    """Start a server as a user does: a new interpreter and the command line."""
    arguments = ["serve", *(f"--set={path}={value}" for path, value in settings.items())]
    environment = {
        **_environment(),
        **(environment or {}),
        "HOLDFAST_TEST_KILL_AT": kill_at,
        "HOLDFAST_TEST_MARKS": str(directory / MARKS),
    }
    with (directory / LOG).open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "killable_server",
            *arguments,
            env=environment,
            stdout=out,
            stderr=out,
        )
    return Life(process.pid, process.wait())


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    path = (ROOT / "src", ROOT / "tests", ROOT / "tests" / "support")
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, path))}


class Supervisor:
    """One state directory and port; at most one server at a time."""

    def __init__(
        self, directory: Path, record: Recorder, seed: int, start: Start = executed
    ) -> None:
        self.state_dir = directory / "state"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.record = record
        self.rng = random.Random(seed)
        self.directory = directory
        self.log_path = directory / LOG
        self.serving_again: list[Again] = []
        self.kills = 0
        self.named = 0
        self.chats: dict[str, list[str]] = {}
        self._start = start
        self._executed = False
        self._life: Life | None = None
        self._down_since: float | None = time.monotonic()
        """Since when no client could connect, over all servers killed since."""
        self._dead_since = time.monotonic()

    async def prepare(self, *users: str) -> str:
        """Make the state directory and a chat of these users."""
        with held(self.state_dir) as state:
            secrets = open_secrets(state, "now")
            self._tokens = Tokens(
                TokenSettings(), shared_secret(secrets.jwt_secret.encode()), SystemClock()
            )
            async with SqliteStore(state / CHATS.name) as store:
                chat_id = f"chat_{len(self.chats)}"
                act = CommandContext(
                    User(TENANT, users[0]), timestamp(time.time()), f"msg_{chat_id}"
                )
                await store.change(CreateChat(act, chat_id, "group", "kills", users[1:]))
        self.chats[chat_id] = list(users)
        return chat_id

    def token(self, user: str) -> str:
        return self._tokens.mint(User(TENANT, user), 3600, USER_SCOPES)

    async def spawn(self, kill_at: str = "", start: Start | None = None) -> None:
        """Start the server, which kills itself at a named point if one is given,
        counted from when it serves.
        """
        armed = self.directory / ARMED
        armed.unlink(missing_ok=True)
        kill_at = kill_at and f"{kill_at}:{armed}"
        settings = {"server.port": self.port, "server.state_dir": str(self.state_dir), **SETTINGS}
        self._executed = (start or self._start) is executed
        self._life = await (start or self._start)(settings, kill_at, self.directory)

    async def serving(self) -> bool:
        """Wait until the server answers; False if it died before. Record the outage."""
        async with asyncio.timeout(START_SECONDS_MAX):
            while not await _ready(self.port):
                if self.died():
                    return False
                await asyncio.sleep(0.01)
        now = time.monotonic()
        assert self._life is not None
        self.serving_again.append(
            Again(now - self._dead_since, _cpu_seconds(self._life.pid), self._executed)
        )
        # from here on it may kill itself, and leave nothing to look at
        (self.directory / ARMED).touch()
        assert self._down_since is not None
        self.record.note(
            FaultWindow(at=self._down_since, until=now, plane="process", name="no server")
        )
        self._down_since = None
        return True

    @property
    def pid(self) -> int:
        assert self._life is not None
        return self._life.pid

    def died(self) -> bool:
        return self._life is None or self._life.ended.done()

    async def dead(self, seconds: float) -> None:
        """Wait until it has killed itself, but not longer than this."""
        assert self._life is not None
        await asyncio.wait([self._life.ended], timeout=seconds)

    async def kill(self) -> None:
        """SIGKILL, unless it has killed itself; returns when the process is gone."""
        assert self._life is not None
        down_since = time.monotonic()
        code = await self._life.end(signal.SIGKILL)
        assert code == -signal.SIGKILL, f"exit code {code}; see {self.log_path}"
        armed = self.directory / ARMED
        # its clients may have known sooner than we
        if armed.exists() and (last_words := armed.read_text()):
            down_since = float(last_words)
        if self._down_since is None:
            self._down_since = down_since
        self.kills += 1
        self._dead_since = time.monotonic()

    async def stop(self) -> None:
        """SIGTERM and wait."""
        assert self._life is not None
        self._down_since = self._down_since or time.monotonic()
        code = await self._life.end(signal.SIGTERM)
        assert code == 0, f"exit code {code}; see {self.log_path}"

    def marks(self) -> Counter[str]:
        """The coverage marks that all its servers have reached."""
        return read_marks(self.directory / MARKS)

    async def note_state(self) -> None:
        """Record what is on disk, read after the server has stopped."""
        with held(self.state_dir) as state:
            async with SqliteStore(state / CHATS.name) as store:
                await note_store(self.record, store, store, self.chats)
                await note_log(self.record, SqliteEventLog(store))


async def _ready(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return (await reader.readline()).startswith(b"HTTP/1.1 200")
    except OSError:
        return False
    finally:
        writer.close()


def _cpu_seconds(pid: int) -> float:
    """The processor time of a process, which does not depend on other processes."""
    after_its_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, after_its_name[11:13])) / os.sysconf("SC_CLK_TCK")


class Person:
    """A client on a real socket with its state on disk."""

    def __init__(self, supervisor: Supervisor, user: str, directory: Path) -> None:
        self.user = user
        self.texts: dict[str, list[str]] = {}
        self._client = RecordingClient(
            supervisor.url,
            supervisor.token(user),
            supervisor.record,
            User(TENANT, user),
            user,
            state=directory / f"{user}.db",
            settings=QUICK,
        )
        self._came = asyncio.Event()
        self.sent = 0

    @property
    def copy(self) -> dict[str, list[tuple[int, str]]]:
        """What it has of every chat."""
        return self._client.copies

    @asynccontextmanager
    async def online(self) -> AsyncIterator[Person]:
        async with self._client:
            listening = asyncio.create_task(self._listen())
            try:
                yield self
            finally:
                listening.cancel()
                await asyncio.wait([listening])

    async def say(self, chat_id: str, content: str) -> None:
        """Send and wait for the ack, over whatever happens in between."""
        self.sent += 1
        await self._client.send(chat_id, content, client_message_id=f"{self.user}-{self.sent}")

    async def connected(self) -> None:
        await self._client.connected()

    async def has(self, chat_id: str, count: int, seconds: float = 30.0) -> None:
        """Wait until this many messages of the chat have come."""
        async with asyncio.timeout(seconds):
            while len(self.copy.get(chat_id, [])) < count:
                self._came.clear()
                await self._came.wait()

    def note_copies(self, *chats: str) -> None:
        for chat_id in chats:
            self._client.note_copy(chat_id)

    async def _listen(self) -> None:
        async for event in self._client.events():
            self._client.take(event)
            match event:
                case Message():
                    self.texts.setdefault(event.chat_id, []).append(event.content)
                    self._came.set()
                case ChatReset(chat_id=chat_id) | ChatGone(chat_id=chat_id):
                    self.texts.pop(chat_id, None)
                case _:
                    pass


async def talk(person: Person, chat_id: str, rng: random.Random, go_on: asyncio.Event) -> None:
    """Several sends are always on their way while ``go_on`` is set; whoever is
    interrupted retries by itself.
    """

    async def say(name: int) -> None:
        number = 0
        while go_on.is_set():
            number += 1
            await person.say(chat_id, f"{person.user} says {name}.{number}")
            await asyncio.sleep(rng.uniform(0.0, 0.02))

    await asyncio.gather(*(say(name) for name in range(3)))


async def all_have_all(supervisor: Supervisor, people: Sequence[Person], chat_id: str) -> None:
    """Wait until everybody has every acknowledged message, and note their copies."""
    head = max(acked.sequence for _, _, acked in supervisor.record.history().acks())
    await asyncio.gather(*(person.has(chat_id, head) for person in people))
    for person in people:
        person.note_copies(chat_id)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]
