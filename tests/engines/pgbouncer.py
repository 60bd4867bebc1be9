"""PgBouncer before a PostgreSQL, as a user who is not root, loopback only."""

from __future__ import annotations

import subprocess

from engines import Server, as_user, free_port, own_folder, program, unprivileged, wait_until
from engines.postgres import accepts

PACKAGE = "pgbouncer"


def start(postgres: Server, pool_mode: str, **settings: str) -> Server:
    """A pooler for the database of ``postgres``; ``settings`` override the defaults."""
    binary = program("pgbouncer", PACKAGE)
    owner = unprivileged("postgres")
    folder, port = own_folder("pgbouncer", owner), free_port()
    options = {
        "listen_addr": "127.0.0.1",
        "listen_port": str(port),
        "unix_socket_dir": "",
        "pool_mode": pool_mode,
        "auth_type": "trust",
        "auth_file": str(folder / "users"),
        **settings,
    }
    (folder / "users").write_text('"postgres" ""\n')
    lines = ["[databases]", f"* = host=127.0.0.1 port={postgres.port}", "[pgbouncer]"]
    (folder / "pgbouncer.ini").write_text(
        "\n".join([*lines, *(f"{k} = {v}" for k, v in options.items()), ""])
    )
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [binary, str(folder / "pgbouncer.ini")],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
            **as_user(owner),  # type: ignore[call-overload]
        )
    server = Server(
        "pgbouncer", f"postgresql://postgres@127.0.0.1:{port}/postgres", port, folder, process
    )
    wait_until(lambda: accepts(port), process, server.log)
    return server
