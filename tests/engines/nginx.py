"""NGINX with the shipped configuration, as an ordinary user, on loopback only."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from engines import (
    Server,
    as_user,
    free_port,
    kill_whole,
    own_folder,
    program,
    unprivileged,
    wait_until,
)

PACKAGE = "nginx-light"
SHIPPED = Path(__file__).resolve().parents[2] / "deploy" / "nginx.conf"
MAIN = """
daemon off;
worker_processes 1;
pid nginx.pid;
error_log stderr notice;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path temp; proxy_temp_path temp; fastcgi_temp_path temp;
    uwsgi_temp_path temp; scgi_temp_path temp;
    include {shipped};
}}
"""


def start(
    upstream: int | Sequence[int] | Mapping[str, Sequence[int]],
    plain_port: int,
    changes: Mapping[str, str] | None = None,
) -> Server:
    """The shipped configuration before servers on these ports, or on those of each
    upstream; only addresses, logs and the certificate are others.

    ``changes`` are further texts of it to be replaced. ``.url`` is its HTTPS address;
    ``cert.pem`` in ``.folder`` is its certificate, of chat.example.com, and
    ``access.log`` its access log.
    """
    if isinstance(upstream, int):
        upstream = [upstream]
    openssl = program("openssl", "openssl")
    owner = unprivileged("www-data")
    folder, port = own_folder("nginx", owner), free_port()
    _certify(openssl, folder)
    replaced = {
        "listen 80;": f"listen 127.0.0.1:{plain_port};",
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "/var/log/nginx/holdfast.log": str(folder / "access.log"),
        "/var/log/nginx/error.log": "stderr",
        "/etc/ssl/chat.example.com.pem": str(folder / "cert.pem"),
        "/etc/ssl/chat.example.com.key": str(folder / "key.pem"),
        **(changes or {}),
    }
    text = _with_nodes(SHIPPED.read_text(), upstream)
    for old, new in replaced.items():
        assert text.count(old) == 1, f"{old!r} is not once in {SHIPPED}"
        text = text.replace(old, new)
    (folder / "holdfast.conf").write_text(text)
    (folder / "nginx.conf").write_text(MAIN.format(shipped=folder / "holdfast.conf"))
    for file in folder.iterdir():
        file.chmod(0o644)
    return _serve(folder, port)


def _with_nodes(text: str, upstream: Sequence[int] | Mapping[str, Sequence[int]]) -> str:
    names = re.findall(r"^upstream (\w+) \{\n    server 127.0.0.1:8080 max_fails=0;", text, re.M)
    ports = upstream if isinstance(upstream, Mapping) else dict.fromkeys(names, upstream)
    assert sorted(names) == sorted(ports), f"the upstreams of {SHIPPED} are {names}"
    for name in names:
        nodes = " ".join(f"server 127.0.0.1:{port} max_fails=0;" for port in ports[name])
        old = f"upstream {name} {{\n    server 127.0.0.1:8080 max_fails=0;"
        text = text.replace(old, f"upstream {name} {{\n    {nodes}")
    return text


def kill(server: Server) -> None:
    """End it at once, old workers included; ``again`` brings it back."""
    kill_whole(server.process)


def again(server: Server) -> Server:
    """Start a killed one as it was."""
    return _serve(server.folder, server.port)


def _serve(folder: Path, port: int) -> Server:
    binary = program("nginx", PACKAGE)
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [binary, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
            **as_user(unprivileged("www-data")),  # type: ignore[call-overload]
        )
    server = Server("nginx", f"https://127.0.0.1:{port}", port, folder, process)
    wait_until(lambda: _listens(port), process, server.log)
    return server


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    except OSError:
        return False


def _certify(openssl: Path, folder: Path) -> None:
    """A certificate that vouches for itself."""
    key = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-keyout",
        str(folder / "key.pem"),
    ]
    name = [
        "-subj",
        "/CN=chat.example.com",
        "-addext",
        "subjectAltName=DNS:chat.example.com,IP:127.0.0.1",
    ]
    subprocess.run(
        [openssl, "req", "-x509", *key, "-out", str(folder / "cert.pem"), "-days", "2", *name],
        check=True,
        capture_output=True,
    )
