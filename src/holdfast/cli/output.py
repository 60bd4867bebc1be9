"""Output: JSON for programs, tables and lines for people. Content is never markup."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.cli.context import CliContext

STEP_SECONDS = 0.5
GAP = 2
FREE_TEXT = frozenset(
    {
        "error",
        "why",
        "reason",
        "what",
        "besides",
        "title",
        "last message",
        "label",
        "scopes",
        "facts",
        "url",
        "target",
        "advice",
    }
)
"""The columns that a table may fold; the others are ids, names and numbers."""
FOLDED_MIN = 12
_Moved = Callable[[str, float, float | None], None]
"""Called with the current step, the amount done, and the total if known."""


def as_json(value: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def line(text: str) -> None:
    typer.echo(text)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> None:
    """Print a table; without rows, print ``empty``, which says what to do."""
    shown = list(rows)
    if not shown:
        typer.echo(empty)
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[printable(value) for value in row] for row in shown]
    natural = [
        max(map(cell_len, (name, *column))) for name, *column in zip(columns, *cells, strict=True)
    ]
    console = Console(highlight=False)
    widths = fit_columns(columns, natural, console.width) if console.is_terminal else natural
    drawn = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for name, width in zip(columns, widths, strict=True):
        drawn.add_column(name, width=width, overflow="fold")
    for row in cells:
        drawn.add_row(*map(Text, row))
    console.width = sum(widths) + GAP * len(widths)
    console.print(drawn, soft_wrap=False)


def fit_columns(columns: Sequence[str], widths: Sequence[int], room: int) -> list[int]:
    """The column widths on a terminal: only free text is folded.

    Ids and names stay whole, so that they can be copied; the terminal wraps a line that
    is still too long.
    """
    fitting = list(widths)
    free = sorted(
        (n for n, name in enumerate(columns) if name in FREE_TEXT), key=lambda n: -widths[n]
    )
    for n in free:
        excess = sum(fitting) + GAP * (len(fitting) - 1) - room
        fitting[n] -= max(0, min(excess, fitting[n] - FOLDED_MIN))
    return fitting


def fields(values: Mapping[str, Any]) -> None:
    """Name and value, one pair a line."""
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        typer.echo(f"{name:<{width}}  {printable(value)}")


def report(context: CliContext, answer: Any, sentence: str) -> None:
    """Print the response for programs, a sentence for people."""
    if context.as_json:
        as_json(answer)
    else:
        line(sentence)


def report_rows(
    context: CliContext,
    found: Any,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    empty: str,
) -> None:
    """Print JSON for programs, a table for people; ``empty`` as in ``table``."""
    if context.as_json:
        as_json(found)
    else:
        table(columns, rows, empty)


def report_object(
    context: CliContext, found: Mapping[str, Any], values: Mapping[str, Any] | None = None
) -> None:
    """Print one object; to people, only ``values`` of it if given."""
    if context.as_json:
        as_json(found)
    else:
        shown = found if values is None else values
        fields({name.replace("_", " "): _flat(value) for name, value in shown.items()})


def secret(context: CliContext, made: Mapping[str, Any], name: str) -> None:
    """Print a new secret alone on stdout, for a pipe, and the warning on stderr."""
    report(context, made, made["secret"])
    if not context.as_json:
        typer.echo(f"{name}: keep the line above; it cannot be shown again", err=True)


def _flat(value: Any) -> Any:
    match value:
        case dict():
            return ", ".join(f"{name}: {_flat(inner)}" for name, inner in value.items()) or "none"
        case list():
            return ", ".join(str(_flat(inner)) for inner in value) or "none"
        case bool():
            return "yes" if value else "no"
        case None:
            return "–"
        case _:
            return value


@contextmanager
def progress(context: CliContext, *, of_bytes: bool = False) -> Iterator[_Moved]:
    """A bar for long work, on a terminal's stderr and never with ``--json``."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    figures = (DownloadColumn(),) if of_bytes else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *figures, TimeElapsedColumn())
    console = Console(stderr=True)
    nobody = context.as_json or not console.is_interactive
    with Progress(*columns, console=console, transient=True, disable=nobody) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda doing, done, in_all: bar.update(
            task, description=doing, completed=done, total=in_all
        )


@contextmanager
def watching(step: Callable[[], tuple[str, int, int] | None], moved: _Moved) -> Iterator[None]:
    """While the block waits for the server, poll the server's progress."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(STEP_SECONDS):
            try:
                now = step()
            except HoldfastError:
                continue  # the call that does the work reports it
            if now is not None:
                moved(*now)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def printable(value: Any) -> str:
    """Text without control characters: it cannot move the cursor or add colour."""
    return "".join(
        c if c.isprintable() or c == " " else "�" if c != "\n" else " ⏎ " for c in str(value)
    )


def message_line(message: Mapping[str, Any]) -> str:
    """One message as a line for people."""
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
            return f"{who} added {whom}" + (", still muted" if event.get("muted") else "")
        case "member_removed":
            if event.get("banned"):
                return f"{who} banned {whom}"
            return f"{whom} left" if who == whom else f"{who} removed {whom}"
        case "user_banned" | "user_unbanned" | "member_muted" | "member_unmuted" as what:
            return f"{who} {what.partition('_')[2]} {whom}"
        case "role_changed":
            return f"{who} made {whom} {printable(event.get('role'))}"
        case "chat_renamed":
            return f"{who} named the chat {printable(event.get('name'))}"
        case _:
            return f"{who} changed the chat"
