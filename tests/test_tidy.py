"""Style that is enforced: layers, purity, sizes, names. What is not checked here is
only a wish.

An exception to a limit is written into EXCEPTIONS with its reason; a raised limit is
not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "holdfast"
MODULES = sorted(SOURCE.rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Imports go one way: a module may import its own folder and what stands on lower lines.
LAYERS = [
    {"cli"},
    {"node"},
    {"settings"},
    {"api", "gateway"},
    {"webhooks", "streaming"},
    {"ingest", "history", "fanout"},
    {"session"},
    {"store", "eventlog", "work", "limits"},
    {"wire"},
    {"access"},
    {"drivers"},
    {"resilience", "message", "errors", "clock", "telemetry", "bounds"},
]
CLIENT_MAY_IMPORT = {
    "client",
    "wire",
    "access",
    "resilience",
    "message",
    "errors",
    "clock",
    "telemetry",
    "bounds",
}
VERIFY_USERS = {"cli", "node", "verify"}

# Pure modules decide from values: no I/O, no async, no clock of their own. Their
# docstrings say so.
PURE = re.compile(r"\(Pure[.:;]")
PURE_PARTS = {"session", "wire"}
IMPURE_IMPORTS = {
    "asyncio", "socket", "threading", "time", "os", "subprocess", "pathlib", "apsw", "sqlite3",
    "picows", "uvicorn", "starlette", "aiohttp", "asyncpg", "redis", "concurrent", "select",
}  # fmt: skip
SERVER_LIBRARIES = {"starlette", "uvicorn", "picows"}
COMPOSITIONS = {"limits/composition.py", "work/outbox.py"}
"""Library entry points: other programs open limits and the outbox without a node."""

ADAPTERS = {"memory", "sqlite", "dynamodb", "kafka", "redis", "postgres"}

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 7
BANNED_NAMES = re.compile(r"(Manager|Handler|Service|Helper|Util|Utils)$")
BANNED_FILES = {"utils.py", "helpers.py", "common.py", "misc.py", "base.py"}
BANNED_WORDS = [
    r"\bTODO\b",
    r"\bFIXME\b",
    r"\bXXX\b",
    r"asyncio\.Queue\(\)",
    r"except Exception:\s*pass",
]

EXCEPTIONS: dict[str, str] = {}
"""'path' or 'path::function' -> why a limit does not apply there."""


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Every imported module by its dotted name; `from a import b` gives both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def over(paths: Iterable[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Check every path in one test, and name all that are wrong at once.

    A test for each path would be thousands, which every worker has to collect.
    """

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            wrong = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    wrong.append(str(error).splitlines()[0])
            assert not wrong, "\n".join(wrong)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def layer_of(part: str) -> int | None:
    return next((i for i, layer in enumerate(LAYERS) if part in layer), None)


@over(MODULES)
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    for name in imports_of(tree_of(path)):
        pieces = name.split(".")
        if pieces[0] != "holdfast" or len(pieces) < 2 or pieces[1] in (part, "__version__"):
            continue
        other = pieces[1]
        if part == "client":
            assert other in CLIENT_MAY_IMPORT, f"client imports {name}"
        elif other == "verify":
            assert part in VERIFY_USERS, f"{part} imports {name}"
        elif part == "verify":
            # they run the whole path without a socket
            drives = path.parent.name in ("simulation", "controls")
            assert other not in {"cli", "node", "api"} | (set() if drives else {"gateway"}), (
                f"verify imports {name}"
            )
        elif part != "__init__":
            mine, theirs = layer_of(part), layer_of(other)
            if theirs is None and other == "client":
                assert part == "cli", f"{part} imports {name}"
                continue
            assert mine is not None and theirs is not None, f"{part} or {other} has no layer"
            if mine == theirs == len(LAYERS) - 1:
                continue  # the values at the bottom may speak of each other
            assert theirs > mine, f"{relative(path)} imports {name}, which is not below it"


@over(MODULES)
def test_only_the_node_chooses_adapters(path: Path) -> None:
    part = part_of(path)
    if part in {"node", "verify"} or relative(path) in COMPOSITIONS:
        return
    for name in imports_of(tree_of(path)):
        pieces = name.split(".")
        if pieces[0] == "holdfast" and ADAPTERS & set(pieces[2:]) and pieces[1] != "drivers":
            assert path.stem in ADAPTERS or path.parent.name in ADAPTERS, (
                f"{relative(path)} imports the adapter {name}"
            )


@over(MODULES)
def test_only_the_transport_knows_the_server_libraries(path: Path) -> None:
    """The client's connection is the other end of the gateway's."""
    if relative(path).startswith("gateway/transport/") or relative(path) == "client/connection.py":
        return
    roots = {name.split(".")[0] for name in imports_of(tree_of(path))}
    assert not roots & SERVER_LIBRARIES, f"{relative(path)} imports {roots & SERVER_LIBRARIES}"


@over(MODULES)
def test_one_module_makes_http_clients(path: Path) -> None:
    """Its answers are bounded (drivers/outbound_http.py); those of another session
    would not be.
    """
    if not {"aiohttp", "httpx"} & {name.split(".")[0] for name in imports_of(tree_of(path))}:
        return  # our own client has a ClientSession too
    made = {"ClientSession", "TCPConnector", "AsyncClient"}
    calls = [node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    names = {
        name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "") for name in calls
    }
    assert relative(path) == "drivers/outbound_http.py" or not names & made, (
        f"{relative(path)} makes {names & made}"
    )


def is_pure(path: Path) -> bool:
    return part_of(path) in PURE_PARTS or bool(PURE.search(ast.get_docstring(tree_of(path)) or ""))


@over([path for path in MODULES if is_pure(path)])
def test_pure_modules_do_no_io(path: Path) -> None:
    tree = tree_of(path)
    roots = {name.split(".")[0] for name in imports_of(tree)}
    assert not roots & IMPURE_IMPORTS, f"{relative(path)} imports {roots & IMPURE_IMPORTS}"
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef | ast.Await)]


@over(MODULES)
def test_sizes(path: Path) -> None:
    if relative(path) not in EXCEPTIONS:
        lines = len(path.read_text().splitlines())
        assert lines <= MODULE_LINES_MAX, (
            f"{relative(path)} has {lines} lines: what would split it along the story?"
        )
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{relative(path)}::{node.name}"
            if where in EXCEPTIONS:
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{where} has {length} lines"
            arguments = [
                a.arg for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            ]
            given = [a for a in arguments if a not in ("self", "cls")]
            assert len(given) <= PARAMETERS_MAX or node.name == "__init__", (
                f"{where} has {len(given)} parameters"
            )


@over(MODULES)
def test_names_and_words(path: Path) -> None:
    assert path.name not in BANNED_FILES, f"{relative(path)}: name the thing it is about"
    text = path.read_text()
    for word in BANNED_WORDS:
        assert not re.search(word, text), f"{relative(path)} contains {word}"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            assert not BANNED_NAMES.search(node.name), f"{relative(path)}: {node.name}"


def classes_and_aliases() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """The modules that define each public class, and those that give its name to
    something else.
    """
    classes: dict[str, set[str]] = {}
    aliases: dict[str, set[str]] = {}
    for path in MODULES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, set()).add(relative(path))
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if isinstance(target, ast.Name):
                    aliases.setdefault(target.id, set()).add(relative(path))
    return classes, aliases


def test_public_class_name_is_defined_once() -> None:
    classes, aliases = classes_and_aliases()
    twice = {name: where for name, where in classes.items() if len(where) > 1}
    assert not twice, f"defined more than once: {twice}"
    repeated = {name: where for name, where in aliases.items() if name in classes}
    assert not repeated, f"an alias repeats the name of a class: {repeated}"


@over(sorted((ROOT / "tests").rglob("*.py")))
def test_every_story_is_run(path: Path) -> None:
    """A function inside a test that nobody calls makes a test that cannot fail."""
    for test in (node for node in ast.walk(tree_of(path)) if isinstance(node, FUNCTIONS)):
        used = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        unused = [
            f.name
            for f in test.body
            if isinstance(f, FUNCTIONS) and not f.decorator_list and f.name not in used
        ]
        assert not unused, f"{test.name}: {unused} is never called"


@over(sorted(SOURCE.rglob("*.sql")))
def test_sql_lies_where_every_adapter_has_it(path: Path) -> None:
    """See ``holdfast.drivers.statements``, which reads it."""
    usual = rf".*/({'|'.join(ADAPTERS)})/(statements|migrations/[0-9]{{4}}|functions/[a-z_]+)\.sql"
    assert re.fullmatch(usual, relative(path)), f"{relative(path)} is not where SQL is looked for"


def test_every_exception_is_used() -> None:
    known = {relative(p) for p in MODULES}
    for key in EXCEPTIONS:
        assert key.split("::")[0] in known, f"{key} is gone; remove its exception"


PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
NAMED_IN_MAP = re.compile(r"^\s*(?:\d+\.|-)?\s*``([a-z_]+)(?:/|\.sql)?``", re.MULTILINE)


@over(PACKAGES)
def test_map_of_a_folder_names_its_modules_and_nothing_else(folder: Path) -> None:
    """The docstring of ``__init__.py``: one line per module, in reading order; SQL and
    Lua may be named too.
    """
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
    others = {path.stem for path in folder.iterdir()} - modules
    named = NAMED_IN_MAP.findall(ast.get_docstring(tree_of(folder / "__init__.py")) or "")
    listed = [name for name in named if name not in others]
    assert sorted(listed) == sorted(modules), (
        f"{folder.name}: every module once, on a line of its own"
    )


PROSE_WIDTH_MAX = 88
BANNED_PROSE = re.compile(
    r"\b(anew|hearsay|his|doorbells?|no member|for ever|so many|seed documents?"
    r"|(is|are|was) away)\b",
    re.IGNORECASE,
)
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if path.name not in {"LICENSE.md", "CHANGELOG.md", "renamed.md"}  # these name what was
)
LINK_OR_CODE = re.compile(r"\]\(|https?://|`[^`]{60,}`")


def prose_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page or a module that a person reads: no code, no table."""
    lines = path.read_text().splitlines()
    if path.suffix == ".md":
        in_code = False
        for number, line in enumerate(lines, 1):
            if line.lstrip().startswith("```"):
                in_code = not in_code
            elif not in_code and not line.startswith("    ") and not line.lstrip().startswith("|"):
                yield number, line
        return
    comments = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith("#")}
    for node in ast.walk(tree_of(path)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            comments |= set(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    for number in sorted(comments):
        yield number, lines[number - 1]


@over([*MODULES, *PAGES])
def test_prose_is_narrow_and_plain(path: Path) -> None:
    for number, line in prose_lines(path):
        where = f"{path.relative_to(ROOT)}:{number}"
        if not LINK_OR_CODE.search(line):
            assert len(line) <= PROSE_WIDTH_MAX, f"{where} has {len(line)} columns"
        assert not BANNED_PROSE.search(line), f"{where}: {line.strip()}"


@over(sorted((ROOT / "tests").rglob("test_*.py")))
def test_test_names_are_short_and_plain(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, FUNCTIONS) and node.name.startswith("test_"):
            assert len(node.name) <= 80, f"{node.name} has {len(node.name)} characters"
            assert not BANNED_PROSE.search(node.name.replace("_", " ")), node.name


LOG_CALLS = {"debug", "info", "warning", "error", "critical", "exception"}
LOG_EVENT = re.compile(r"([a-z]+)\.[a-z]+(_[a-z0-9]+)+")
PARTS = {path.name for path in SOURCE.iterdir() if path.is_dir()}


@over(MODULES)
def test_log_events_are_part_and_noun_verb(path: Path) -> None:
    """What happened is a name that can be searched for; what varies is a field."""
    for node in ast.walk(tree_of(path)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        logger = ast.unparse(node.func.value)
        if node.func.attr not in LOG_CALLS or not logger.endswith("log") or not node.args:
            continue
        event = node.args[0]
        assert not isinstance(event, ast.JoinedStr), f"{relative(path)}: {ast.unparse(event)}"
        if isinstance(event, ast.Constant):
            match = LOG_EVENT.fullmatch(str(event.value))
            assert match and match[1] in PARTS, f"{relative(path)}: {event.value!r}"


LIBRARY_MODULES = {
    "work/chat_transport.py": "jobs of an application that post to a chat",
    "limits/asgi.py": "rate limits in the user's own ASGI application",
    "cli/__main__.py": "python -m holdfast.cli",
}
"""What only programs of users import."""


def test_no_product_module_is_used_by_tests_alone() -> None:
    imported = {
        name
        for path in MODULES
        for name in imports_of(tree_of(path))
        if name.startswith("holdfast.")
    }
    for path in MODULES:
        if path.name == "__init__.py" or relative(path) in LIBRARY_MODULES:
            continue
        if ADAPTERS & set(path.relative_to(SOURCE).with_suffix("").parts):
            continue  # users choose adapters by URL, tests the ones in memory
        dotted = f"holdfast.{relative(path).removesuffix('.py').replace('/', '.')}"
        assert dotted in imported, f"{relative(path)}: only tests import it"


CONSTANT = re.compile(r"[A-Z][A-Z0-9_]+")


@over(sorted((ROOT / "tests").rglob("*.py")))
def test_no_module_constant_is_patched(path: Path) -> None:
    """A value that a test must change is a parameter."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr":
            names = [a.value for a in node.args[:2] if isinstance(a, ast.Constant)]
            patched = [n for n in names if CONSTANT.fullmatch(str(n).rpartition(".")[2])]
            assert not patched, f"{path.name}:{node.lineno} patches {patched[0]}"
