"""What the operator reads at startup: addresses, state, and settings to know about."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator

from holdfast import __version__
from holdfast.drivers.files import default_state_dir
from holdfast.settings import Settings, differences

FILES_BESIDE_CONNECTIONS = 200
"""Files a node opens besides connections: databases, threads, requests."""


def banner_lines(settings: Settings, files_max: int = sys.maxsize) -> Iterator[str]:
    """The lines of the banner. ``files_max``: how many files the process may open."""
    server = settings.server
    state = server.state_path
    yield f"Holdfast {__version__} listens on {server.url}"
    yield f"  storage   {_storage(settings)}"
    if state != server.state_dir_given:
        yield (
            f"            others can write to {server.state_dir_given}: everything is in {state},"
            " mode 0700"
        )
    if settings.cluster.postgres:
        yield f"  secrets   {settings.access.tokens.secret_file}; API keys are in PostgreSQL"
    else:
        yield f"  secrets   {state / 'secrets.json'}, readable only by you"
    if server.trusted_proxies:
        yield (
            f"  network   {server.host}, behind {', '.join(server.trusted_proxies)}, where TLS ends"
        )
    else:
        yield "  network   this machine only"
    wanted = settings.access.connections.connections_max + settings.access.http.connections_max
    if (room := max(files_max - FILES_BESIDE_CONNECTIONS, 0)) < wanted:
        yield (
            f"  sockets   room for about {room:,} connections, not {wanted:,}: raise the hard limit"
            " of open files"
        )
    yield f"  browsers  pages of {', '.join(sorted(origins_of(settings)))}"
    changed = [
        entry
        for entry in differences(settings)
        if entry[0] not in ("server.state_dir", "server.port")
    ]
    yield (
        f"  settings  {len(changed)} differ from their defaults:"
        if changed
        else "  settings  all at their defaults"
    )
    for path, value, default in changed:
        yield f"            {path} = {value} (default {default})"
    program = "holdfast" if shutil.which("holdfast") else sys.argv[0]
    defaults = Settings().server
    where = "" if state == default_state_dir() else f" --state-dir {shlex.quote(str(state))}"
    at = "" if server.url == defaults.url else f" --url {server.url}"
    if settings.access.tokens.secret_file:  # commands find the token keys by the settings
        where, at = " --config FILE", ""
    yield f"  try       {program} chat create --user alice --member bob --name lobby{where}{at}"
    yield f"            {program} chat open lobby --user alice{where}{at}"
    yield f"            {program} token --user alice{where}    (for a client of your own)"
    yield f"  the API   {server.url}/docs"


def _storage(settings: Settings) -> str:
    if settings.cluster.postgres:
        return "PostgreSQL, shared with the other nodes of the cluster"
    full = settings.durability.sqlite.synchronous == "FULL"
    kept = (
        "an ack means that the message is on disk"
        if full
        else "A POWER CUT MAY LOSE WHAT WAS ACKNOWLEDGED"
    )
    return f"SQLite in {settings.server.state_path}; {kept}"


def origins_of(settings: Settings) -> frozenset[str]:
    """The origins whose pages may connect: the server's own and the allowed ones."""
    own = {f"http://{host}:{settings.server.port}" for host in ("127.0.0.1", "[::1]", "localhost")}
    return frozenset(own | set(settings.server.allowed_origins))
