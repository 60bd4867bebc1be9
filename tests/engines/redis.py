"""Redis: nothing on disk, never evicts, loopback only."""

from __future__ import annotations

import socket
import subprocess
from typing import Any

import redis

from engines import Server, free_port, own_folder, program, wait_until

PACKAGE = "redis-server"
CLUSTER = {"cluster-enabled": "yes"}


def start(port: int = 0, **settings: str) -> Server:
    """An empty Redis; ``port``: a former one's; ``settings`` override the defaults."""
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
            [binary, *arguments],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
        )
    server = Server("redis", f"redis://127.0.0.1:{port}/0", port, folder, process)
    wait_until(lambda: _answers(port), process, server.log)
    return server


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
            probe.settimeout(1)
            probe.sendall(b"PING\r\n")
            return probe.recv(5) in (b"+PONG", b"-NOAU")  # one that wants a password answers, too
    except OSError:
        return False


def cluster() -> Server:
    """One server in cluster mode that has all slots."""
    server = start(**CLUSTER, **{"cluster-port": str(free_port())})
    say(server, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
    wait_until(
        lambda: say(server, "CLUSTER INFO")["cluster_state"] == "ok", server.process, server.log
    )
    return server


def sentinel(primary: Server, service: str, quorum: int = 2, *lines: str) -> Server:
    """A sentinel for ``primary`` under this name; ``lines``: more configuration."""
    binary = program("redis-server", PACKAGE)
    folder = own_folder("sentinel", None)
    port = free_port()
    file = folder / "sentinel.conf"
    file.write_text(
        "\n".join(
            [
                *("bind 127.0.0.1", f"port {port}", f"dir {folder}"),
                f"sentinel monitor {service} 127.0.0.1 {primary.port} {quorum}",
                f"sentinel down-after-milliseconds {service} 300",
                f"sentinel failover-timeout {service} 2000",
                *lines,
            ]
        )
        + "\n"
    )
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [binary, file, "--sentinel"],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
        )
    server = Server("sentinel", f"redis://127.0.0.1:{port}", port, folder, process)
    wait_until(lambda: _answers(port), process, server.log)
    return server


def say(server: Server, *words: str, password: str | None = None) -> Any:
    """What it answers to one command."""
    with redis.Redis(port=server.port, password=password, decode_responses=True) as client:
        return client.execute_command(*words)
