"""How things look: JSON for programs, tables and lines for people. Content is never markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text


def as_json(value: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def line(text: str) -> None:
    typer.echo(text)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> None:
    """A table; ``empty`` is said, with what to do, where there is nothing to show."""
    shown = list(rows)
    if not shown:
        typer.echo(empty)
        return
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        drawn.add_column(name, overflow="fold", no_wrap=name in ("chat", "key", "id"))
    for row in shown:
        drawn.add_row(*(Text(printable(value)) for value in row))
    Console(highlight=False, soft_wrap=False).print(drawn)


def fields(values: Mapping[str, Any]) -> None:
    """Name and value, one pair a line."""
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        typer.echo(f"{name:<{width}}  {printable(value)}")


def printable(value: Any) -> str:
    """Text that cannot move the cursor or colour the terminal, whoever wrote it."""
    return "".join(c if c.isprintable() or c == " " else "�" if c != "\n" else " ⏎ " for c in str(value))


def message_line(message: Mapping[str, Any]) -> str:
    """A message as people read it."""
    time = str(message["created_at"])[11:16]
    if message["kind"] == "event":
        return f"{time} — {_event(message)}"
    content = message["content"] or "(removed)"
    return f"{time} {printable(message['sender_id'])}: {printable(content)}"


def _event(message: Mapping[str, Any]) -> str:
    try:
        event = msgspec.json.decode(message["content"])
    except msgspec.DecodeError:
        event = {}
    who, whom = printable(message["sender_id"]), printable(event.get("user_id", "somebody"))
    match event.get("event"):
        case "member_added":
            return f"{who} added {whom}"
        case "member_removed":
            return f"{whom} left" if who == whom else f"{who} removed {whom}"
        case "role_changed":
            return f"{who} made {whom} {printable(event.get('role'))}"
        case "chat_renamed":
            return f"{who} named the chat {printable(event.get('name'))}"
        case _:
            return f"{who} changed the chat"
