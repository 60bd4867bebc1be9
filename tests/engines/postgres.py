"""PostgreSQL as an ordinary user, with fsync, on loopback only."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

from engines import (
    Server,
    as_user,
    free_port,
    kill_whole,
    own_folder,
    program,
    stopped_whole,
    unprivileged,
    wait_until,
)

PACKAGE = "postgresql"
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_connections": "100",
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "log_min_messages": "warning",
    "log_lock_waits": "on",
}


def binaries() -> list[Path]:
    """Where Debian puts them, newest first; PATH is asked after."""
    return sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: path.parent.name, reverse=True
    )


def start(**settings: str) -> Server:
    """A new cluster that trusts loopback; ``settings`` override the defaults."""
    owner = unprivileged("postgres")
    initdb = program("initdb", PACKAGE, binaries())
    folder = own_folder("postgres", owner)
    data = folder / "data"
    subprocess.run(
        [
            *(initdb, "-D", data, "-U", "postgres", "-A", "trust"),
            *("-E", "UTF8", "--locale=C", "--no-sync"),
        ],
        check=True,
        capture_output=True,
        cwd=folder,
        **as_user(owner),  # type: ignore[call-overload]
    )
    return _serve(folder, free_port(), settings)


def standby(primary: Server, port: int = 0, **settings: str) -> Server:
    """A streaming replica; ``port``: a former server's. ``pg_wal_replay_pause()`` on it
    makes it lag.
    """
    owner = unprivileged("postgres")
    folder = own_folder("standby", owner)
    subprocess.run(
        [
            program("pg_basebackup", PACKAGE, binaries()),
            *("-D", folder / "data", "-d", primary.url, "-R", "-c", "fast"),
        ],
        check=True,
        capture_output=True,
        cwd=folder,
        **as_user(owner),  # type: ignore[call-overload]
    )
    return _serve(folder, port or free_port(), {"hot_standby": "on", **settings})


def own_files(*files: Path) -> None:
    """Give files, such as a key, to the user it runs as."""
    owner = unprivileged("postgres")
    for file in files:
        file.chmod(0o600)
        if owner is not None:
            shutil.chown(file, owner)


def kill(server: Server) -> None:
    """End it at once with its processes, which would go on for a moment without it. Its
    data stays; ``again`` brings it back.
    """
    kill_whole(server.process)


def stopped(server: Server) -> AbstractContextManager[None]:
    """It hangs with its processes while the block runs: connections stay open, and
    nothing is answered.
    """
    return stopped_whole(server.process)


def again(server: Server, **settings: str) -> Server:
    """Start a killed server on the data and the port it had."""
    (server.folder / "data" / "postmaster.pid").unlink(missing_ok=True)
    return _serve(server.folder, server.port, settings)


def _serve(folder: Path, port: int, settings: dict[str, str]) -> Server:
    binary = program("postgres", PACKAGE, binaries())
    options = [f"-c{name}={value}" for name, value in {**SETTINGS, **settings}.items()]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [binary, "-D", str(folder / "data"), "-p", str(port), *options],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder, start_new_session=True,
            **as_user(unprivileged("postgres")),  # type: ignore[call-overload]
        )  # fmt: skip
    url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
    # At once, without a last checkpoint: its data goes with it.
    server = Server("postgres", url, port, folder, process, stop_signal=signal.SIGQUIT)
    wait_until(lambda: accepts(port), process, server.log)
    return server


def accepts(port: int) -> bool:
    """Whether it lets us in: while it starts up it answers with an error instead."""
    hello = b"\x00\x03\x00\x00user\x00postgres\x00database\x00postgres\x00\x00"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
            probe.settimeout(1)
            probe.sendall((len(hello) + 4).to_bytes(4, "big") + hello)
            return probe.recv(1) == b"R"
    except OSError:
        return False
