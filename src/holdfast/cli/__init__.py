"""The command line: start a server, chat, operate it.

Commands reach a running server over HTTP and WebSocket only.

- ``app``            all commands, in the order of ``holdfast --help``
- ``context``        what all share: options, groups, error output
- ``rest``           the HTTP client of the commands
- ``output``         JSON for programs, tables and lines for people
- ``serve``          ``serve``: start a server
- ``operations``     tokens, status, backup, restore, keys, erasure
- ``doctor``         ``doctor``: grades a deployment
- ``alerts``         ``alerts``, and what ``status`` begins with
- ``cluster``        ``status --cluster``: all nodes and what they share
- ``audit``          ``audit``: what operators did
- ``chats``          chats, for members and for operators
- ``terminal_chat``  ``chat open``: one chat in a terminal
- ``screen``         the terminal, or the pipe, in which a chat is shown
- ``line_editor``    the line that a user types (pure)
- ``cutoff``         revoke, ban, mute, disconnect
- ``replies``        ``ask``, ``replies``, ``usage``: AI replies
- ``reply_stream``   one AI reply as events, across dropped connections
- ``jobs``           jobs and their dead letters
- ``dead``           ``dead``: the dead letters of fanout and of jobs
- ``webhooks``       webhook endpoints
- ``rules``          rate limits
- ``verify``         ``verify``: check a running server's promises
- ``conformance``    ``conformance``: check a client, in any language
- ``__main__``       ``python -m holdfast.cli``
"""

from __future__ import annotations


def main() -> None:
    """The ``holdfast`` program."""
    from holdfast.cli.app import app

    app(prog_name="holdfast")
