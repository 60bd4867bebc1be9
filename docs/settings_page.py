"""docs/reference/settings.md: every setting, its type, its default, and its effect.

Paths, types and defaults come from ``holdfast.settings``; what a value means is the
text under its field. ``page`` refuses to be written when a setting has none.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any, get_args, get_type_hints

from holdfast.settings import Settings, paths

INTRODUCTION = """# Settings

Written by `docs/generate.py` from `holdfast.settings`; do not edit.

Every setting has a default, and with nothing configured all are at it. The later source
wins: defaults, a file (`holdfast serve -c holdfast.toml`; TOML or YAML), `HOLDFAST_…`
variables with `__` between the parts of a path
(`HOLDFAST_GATEWAY__SHUTDOWN__DRAIN_TIMEOUT_SECONDS=10`), options (`--set PATH=VALUE`,
`--host`, `--port`, `--state-dir`). `HOLDFAST_HOST`, `HOLDFAST_PORT` and
`HOLDFAST_STATE_DIR` are short for `server.…`. Lists in variables are separated by
commas.

A setting that does not exist, has the wrong type or is out of range stops the start
with its path and the reason; nothing is ignored. What differs from its default is
listed at start, in `holdfast status` and as `holdfast_setting_changed{path}`.

```toml
[server]
host = "0.0.0.0"
trusted_proxies = ["10.0.0.5/32"]

[gateway.backpressure.inbound]
rate_limit_per_second = 20
```
"""


def page() -> str:
    lines = [INTRODUCTION]
    group = ""
    for path, default in _with_listed(paths()):
        head, _, _ = path.rpartition(".")
        if head != group:
            group = head
            about = [text, ""] if (text := _text_under(group)) else []
            lines += [
                "",
                f"## {group}",
                "",
                *about,
                "| setting | type | default | what happens |",
                "|---|---|---|---|",
            ]
        name, text = path.removeprefix(f"{head}."), _text_under(path)
        assert text, f"nothing says what {path} means"
        lines.append(f"| `{name}` | {_type(path)} | {_default(default)} | {text} |")
    return "\n".join(lines) + "\n"


def _with_listed(found: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Every setting; after a list of groups (``[[access.issuers]]``), those of each."""
    for path, default in found:
        yield path, default
        if is_dataclass(kind := _listed(_kind(path))):
            yield from _of_each(path, kind)


def _of_each(path: str, kind: Any) -> Iterator[tuple[str, Any]]:
    """The settings of a group, and of the groups in it."""
    for each in fields(kind):
        inner = f"{path}.{each.name}"
        if is_dataclass(_kind(inner)):
            yield from _of_each(inner, _kind(inner))
        else:
            yield inner, each.default


def _listed(kind: Any) -> Any:
    """What a list holds; any other kind as it is."""
    return kind.__args__[0] if getattr(kind, "__origin__", None) is tuple else kind


def _text_under(path: str) -> str:
    """What stands under the field of a setting, or of a group of them."""
    group, _, name = path.rpartition(".")
    text = _under_fields(_kind(group)).get(name, "")
    return " ".join(text.split()).replace("``", "`")


def _under_fields(kind: Any) -> dict[str, str]:
    """The texts that follow the fields of a class in its source."""
    source = textwrap.dedent(inspect.getsource(_listed(kind)))
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: text.value.value
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _kind(path: str) -> Any:
    kind: Any = Settings
    for part in filter(None, path.split(".")):
        kind = get_type_hints(_listed(kind))[part]
    return kind


def _type(path: str) -> str:
    kind = _kind(path)
    if is_dataclass(_listed(kind)):
        return "list of groups"
    if any(map(is_dataclass, get_args(kind))):
        return "group"
    if kind in (int, float, str, bool):
        return {int: "integer", float: "number", str: "text", bool: "true or false"}[kind]
    if kind == tuple[str, ...]:
        return "list of texts"
    if (each := _listed(kind)) is not kind:
        return f"list of {', '.join(_choices(each))}"
    return "text" if kind == str | None else " or ".join(_choices(kind))


def _choices(kind: Any) -> Iterator[str]:
    for choice in kind.__args__:
        yield f"`{str(choice).lower() if isinstance(choice, bool) else choice}`"


def _default(value: Any) -> str:
    match value:
        case _ if value is MISSING:
            return "required"
        case bool():
            return str(value).lower()
        case ():
            return "none"
        case int() | float():
            return f"{value:,}"
        case tuple():
            return f"`{json.dumps(value)}`"
        case _:
            return f"`{value}`"
