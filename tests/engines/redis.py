"""Redis: nothing on disk, never evicts, loopback only."""

from __future__ import annotations

import socket
import subprocess

from engines import Server, free_port, own_folder, program, wait_until

PACKAGE = "redis-server"


def start(port: int = 0, **settings: str) -> Server:
    """An empty Redis; ``port`` to begin again where another one was; ``settings`` override the defaults."""
    binary = program("redis-server", PACKAGE)
    folder = own_folder("redis", None)
    port = port or free_port()
    options = {
        "bind": "127.0.0.1", "port": str(port), "dir": str(folder), "save": "", "appendonly": "no",
        "maxmemory-policy": "noeviction", **settings,
    }  # fmt: skip
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [binary, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder, start_new_session=True
        )
    server = Server("redis", f"redis://127.0.0.1:{port}/0", port, folder, process)
    wait_until(lambda: _answers(port), process, server.log)
    return server


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
            probe.settimeout(1)
            probe.sendall(b"PING\r\n")
            return probe.recv(5) == b"+PONG"
    except OSError:
        return False
