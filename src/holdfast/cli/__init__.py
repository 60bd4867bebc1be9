"""The command line: start a server, talk, operate. It speaks to a running server over HTTP and WebSocket only.

``app`` lists the commands, ``reach`` finds the server and the credentials, ``rest`` asks the server, ``talk`` is
``chat open``; the other modules hold one group of commands each.
"""

from __future__ import annotations


def main() -> None:
    """The ``holdfast`` program."""
    from holdfast.cli.app import app

    app(prog_name="holdfast")
