"""Settings: file, environment and options in, one frozen tree out.

The tree keeps the paths and names of the design documents
(``gateway.backpressure.inbound.rate_limit_per_second``). Its leaves are small
dataclasses that live beside what they configure and check their own values. The later
source wins: defaults, the file (TOML or YAML), ``HOLDFAST_…`` variables (``__`` between
the parts of a path), options.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from holdfast.access.settings import AccessSettings
from holdfast.api.deps import ApiSettings
from holdfast.api.problems import said_of
from holdfast.drivers.cluster import ROLES, ClusterSettings, check_roles
from holdfast.drivers.files import default_state_dir, read_table, state_dir_in
from holdfast.drivers.sqlite.database import SqliteSettings
from holdfast.errors import BadSetting, HoldfastError
from holdfast.fanout.settings import FanoutSettings
from holdfast.gateway.settings import GatewaySettings
from holdfast.history.history import HistorySettings
from holdfast.ingest.durability import ChangeSettings
from holdfast.ingest.expiry import KeySettings
from holdfast.ingest.send_queue import IntakeSettings
from holdfast.ingest.watermarks import WatermarkSettings
from holdfast.limits.composition import LimitsSettings
from holdfast.message import check_id
from holdfast.store.plan import ChatSettings
from holdfast.streaming.settings import StreamingSettings
from holdfast.telemetry import TraceSettings, safe_text
from holdfast.telemetry.notices import AlertSettings
from holdfast.webhooks.parts import WorkSettings

PREFIX = "HOLDFAST_"
NOT_SETTINGS = frozenset(
    f"HOLDFAST_{name}"
    for name in ("CONFIG", "INSTALL_ENGINES", "REQUIRE_ENGINES", "SEED", "SEEDS", "TOKEN", "URL")
)
"""Variables that other parts read: the tests and the command line's client side."""
SERVICE_LINKS = re.compile(
    r"HOLDFAST_(SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)
"""Variables that Kubernetes sets in every container if a Service is named holdfast;
also HOLDFAST_PORT, with a URL."""
SHORT_NAMES = {"HOST": "server.host", "PORT": "server.port", "STATE_DIR": "server.state_dir"}
AROUND_A_MESSAGE_BYTES = 1024
"""The least that a frame or a body needs besides the message's content."""
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The one port for HTTP and WebSocket, and who may stand in front of it."""

    host: str = "127.0.0.1"
    """Where to listen. An address that other machines can reach is refused unless
    ``server.trusted_proxies`` names the TLS proxy in front.
    """
    port: int = 8080
    """The one port for HTTP and WebSocket; 0 takes a free one and prints it. A busy
    port stops the start.
    """
    state_dir: str = ""
    """Everything that is kept. Left empty: ``$XDG_STATE_HOME/holdfast``, without that
    variable ``~/.local/state/holdfast``. One process at a time: a second one is refused
    and names the first one's process id.
    """
    trusted_proxies: tuple[str, ...] = ()
    """Networks whose X-Forwarded-For is trusted; others count by their own address.
    """
    allowed_origins: tuple[str, ...] = ()
    """Further origins whose pages may connect, exactly as browsers send them; others
    get 403. ``*`` is refused.
    """
    log_format: Literal["text", "json"] = "text"
    """``json`` for machines, ``text`` for people; always on stderr."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Quieter lines are not written."""
    node_id: str = ""
    """This node's name in status, traces, jobs and among the nodes that share limits:
    each must have its own. Left empty, one is made up at the first start and kept in
    the state directory (``name.json``).
    """

    roles: tuple[str, ...] = ROLES
    """What this node does; the other nodes of its cluster do the rest. ``gateway``:
    WebSockets. ``ingest``: REST of users and tenants; needed by gateway. ``streaming``:
    AI replies. ``work``: jobs, webhooks, assistants. ``admin``: REST of operators.
    """

    def __post_init__(self) -> None:
        check_roles(self.roles)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, not {self.port}")
        if self.node_id and (problem := check_id(self.node_id, "node_id")):
            raise ValueError(problem)
        _ = self.proxies  # ValueError if one is none
        if "*" in self.allowed_origins:
            raise ValueError("allowed_origins are exact: * is not one")
        if self.host not in LOOPBACK and not self.trusted_proxies:
            raise ValueError(
                f"host {self.host} can be reached from other machines and this port speaks no TLS:"
                " put a TLS proxy in front of it and name the proxy's address in"
                " server.trusted_proxies, or bind 127.0.0.1"
            )

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def proxies(self) -> tuple[IPv4Network | IPv6Network, ...]:
        return tuple(ip_network(proxy) for proxy in self.trusted_proxies)

    @property
    def state_path(self) -> Path:
        """The state directory; by default the one where commands look, too."""
        return state_dir_in(self.state_dir_given)

    @property
    def state_dir_given(self) -> Path:
        return Path(self.state_dir).expanduser() if self.state_dir else default_state_dir()


@dataclass(frozen=True, slots=True)
class DurabilitySettings:
    """Ingest, history and the store."""

    intake: IntakeSettings = field(default_factory=IntakeSettings)
    changes: ChangeSettings = field(default_factory=ChangeSettings)
    history: HistorySettings = field(default_factory=HistorySettings)
    watermarks: WatermarkSettings = field(default_factory=WatermarkSettings)
    chats: ChatSettings = field(default_factory=ChatSettings)
    keys: KeySettings = field(default_factory=KeySettings)
    sqlite: SqliteSettings = field(default_factory=SqliteSettings)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set."""

    server: ServerSettings = field(default_factory=ServerSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    api: ApiSettings = field(default_factory=ApiSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    durability: DurabilitySettings = field(default_factory=DurabilitySettings)
    fanout: FanoutSettings = field(default_factory=FanoutSettings)
    limits: LimitsSettings = field(default_factory=LimitsSettings)
    work: WorkSettings = field(default_factory=WorkSettings)
    streaming: StreamingSettings = field(default_factory=StreamingSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    traces: TraceSettings = field(default_factory=TraceSettings)
    alerts: AlertSettings = field(default_factory=AlertSettings)

    def __post_init__(self) -> None:
        inbound = self.gateway.backpressure.inbound
        for name, bytes_max in (
            ("gateway.backpressure.inbound.max_frame_bytes", inbound.max_frame_bytes),
            ("api.body_bytes_max", self.api.body_bytes_max),
        ):
            if bytes_max < inbound.max_message_size_bytes + AROUND_A_MESSAGE_BYTES:
                raise ValueError(
                    f"{name} must be at least {AROUND_A_MESSAGE_BYTES} bytes above"
                    " gateway.backpressure.inbound.max_message_size_bytes: a message comes with"
                    " its ids around it"
                )
        if self.gateway.pages.resume_chats_max < self.durability.chats.chats_per_user_max:
            raise ValueError(
                "gateway.pages.resume_chats_max must not be below"
                " durability.chats.chats_per_user_max: whoever is in that many chats could not"
                " resume"
            )
        if self.cluster.postgres and not self.access.tokens.secret_file:
            raise ValueError(
                "cluster.postgres needs access.tokens.secret_file: a file with the same token keys"
                " on every node, a key of at least 32 characters on each line (`openssl rand"
                " -base64 48`)"
            )
        self._share()
        self.cluster.check_others(self.server.roles, self.work.url, self.limits.rules_url)

    def _share(self) -> None:
        """What nodes share is where ``cluster`` says, unless a part's own setting
        does."""
        redis, postgres = self.cluster.redis, self.cluster.postgres
        limits, streaming, work = self.limits, self.streaming, self.work
        shared = {
            "limits": replace(
                limits,
                counters_url=limits.counters_url or redis,
                rules_url=limits.rules_url or postgres,
            ),
            "streaming": replace(streaming, replies_url=streaming.replies_url or redis),
            "work": replace(work, url=work.url or postgres),
        }
        for name, part in shared.items():
            object.__setattr__(self, name, part)


REMOVED = {
    "access.handshakes_per_ip_per_minute": "connect:address",
    "api.user_rate_per_second": "rest:user",
    "api.user_burst": "rest:user",
    "api.tenant_rate_per_second": "rest:tenant",
    "api.tenant_burst": "rest:tenant",
}
"""Settings that a rule has replaced: naming one stops the start."""

ABSENT_ENGINES = (
    "durability.dynamodb",
    "durability.kafka",
    "fanout.kafka",
    "fanout.dlq.topic",
)
"""Settings of the design documents for engines that this version does not have: naming
one stops the start."""

QUEUE_FAILOVER = {
    f"QUEUE_FAILOVER_{name.upper()}": f"streaming.queue_failover.{name}"
    for name in ("enabled", "timeout_seconds", "max_retries", "base_delay_ms", "max_delay_ms")
}
"""Names of a design document: variables, with or without ``HOLDFAST_``."""

ALIASES = {
    "fanout.kafka.consumer.max_poll_records": "fanout.read_entries_max",
    **QUEUE_FAILOVER,
}
"""Old path -> new path. Both may be set if they agree."""


def _is_service_link(name: str, value: str) -> bool:
    return SERVICE_LINKS.fullmatch(name) is not None or (name == "HOLDFAST_PORT" and "://" in value)


def load(file: Path | None, environ: Mapping[str, str], overrides: Mapping[str, Any]) -> Settings:
    """Load the settings; BadSetting names the path and the reason.

    ``overrides`` are by dotted path.
    """
    tree: dict[str, Any] = read_table(file) if file else {}
    given = {path: value for path in _RENAMED if (value := _pop(tree, path)) is not None}
    _check_names(tree, Settings, "", str(file))
    given.update(_queue_failover(environ))
    for name, value in environ.items():
        if (
            name.startswith(PREFIX)
            and name.removeprefix(PREFIX) not in QUEUE_FAILOVER
            and name not in NOT_SETTINGS
            and not _is_service_link(name, value)
        ):
            short = name.removeprefix(PREFIX)
            path = SHORT_NAMES.get(short, short.lower().replace("__", "."))
            if path in _RENAMED:
                given[path] = value
            else:
                _put(tree, path, value, name)
    for path, value in overrides.items():
        if value is not None and path in _RENAMED:
            given[path] = value
        elif value is not None:
            _put(tree, path, value, path)
    _put_renamed(tree, given)
    try:
        settings = msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise BadSetting(_explain(str(error))) from None
    except HoldfastError as error:
        raise BadSetting(error.message) from None
    for path, value in _leaves("", settings):
        if not _is_finite(value):  # it would pass every comparison
            raise BadSetting(f"{path} must be a number, not {_shown(value)}")
    return settings


def _is_finite(value: Any) -> bool:
    """Whether a setting, or each one in a list of groups, is no NaN and no infinity."""
    if is_dataclass(value):
        return all(_is_finite(getattr(value, item.name)) for item in fields(value))
    if isinstance(value, tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def differences(settings: Settings) -> Iterator[tuple[str, Any, Any]]:
    """Every setting that is not at its default, safe to show: (path, value,
    default)."""
    for path, value, default in _differences("", settings, Settings()):
        yield path, _shown(value), default


def _shown(value: Any) -> Any:
    """A list of groups in the form of a variable."""
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        value = msgspec.json.encode([getattr(each, "shown", each) for each in value]).decode()
    return safe_text(value) if isinstance(value, str) else value


def paths() -> Iterator[tuple[str, Any]]:
    """Every setting with its default, for the reference."""
    yield from _leaves("", Settings())


def _leaves(prefix: str, node: Any) -> Iterator[tuple[str, Any]]:
    for item in fields(node):
        value, path = getattr(node, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from _leaves(f"{path}.", value)
        else:
            yield path, value


def _differences(prefix: str, node: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    known = dict(_leaves(prefix, default))
    for path, value in _leaves(prefix, node):
        if value != known[path]:
            yield path, value, known[path]


def _check_names(tree: dict[str, Any], kind: Any, prefix: str, source: str) -> None:
    """BadSetting for an unknown name: a typo would silently leave the default."""
    hints = get_type_hints(kind)
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if name not in hints:
            raise _no_setting(_first_leaf(path, value), source)
        group = _group(hints[name])
        if group is not None and isinstance(value, dict):
            _check_names(value, group, f"{path}.", source)
        elif group is not None and isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, dict):
                    _check_names(item, group, f"{path}[{number}].", source)


def _group(kind: Any) -> Any:
    """The group of settings that a setting is, may be, or is a list of; else None."""
    return next((group for group in (kind, *get_args(kind)) if is_dataclass(group)), None)


def _first_leaf(path: str, value: Any) -> str:
    """The path of the first setting in a group: it says more than the group's."""
    while isinstance(value, dict) and value and path.startswith(ABSENT_ENGINES):
        name, value = next(iter(value.items()))
        path = f"{path}.{name}"
    return path


def _listed(kind: Any) -> Any:
    """The group that a setting is a list of, or None."""
    listed = get_args(kind)[0] if getattr(kind, "__origin__", None) is tuple else None
    return listed if is_dataclass(listed) else None


_RENAMED = frozenset(ALIASES) | frozenset(ALIASES.values())


def _pop(tree: dict[str, Any], path: str) -> Any:
    """Take the value at a dotted path out of the tree; groups left empty go too."""
    name, _, rest = path.partition(".")
    if not rest:
        return tree.pop(name, None)
    group = tree.get(name)
    value = _pop(group, rest) if isinstance(group, dict) else None
    if value is not None and not group:
        del tree[name]
    return value


def _queue_failover(environ: Mapping[str, str]) -> dict[str, str]:
    """The design document's variables. BadSetting if the two forms of a name differ, or
    for a name that is none: a typo would silently leave the default.
    """
    given = {}
    for full in environ:
        name = full.removeprefix(PREFIX)
        if name.startswith("QUEUE_FAILOVER_") and name not in QUEUE_FAILOVER:
            raise BadSetting(f"there is no setting {full}; there are {', '.join(QUEUE_FAILOVER)}")
    for name in QUEUE_FAILOVER:
        values = {full: environ[full] for full in (name, PREFIX + name) if full in environ}
        if len(values) == 2 and not _agree(*values.values()):
            both = " and ".join(f"{full}={value}" for full, value in values.items())
            raise BadSetting(f"{both} are one setting with two values; keep one of them")
        for value in values.values():
            given[name] = value
    return given


def _agree(one: Any, other: Any) -> bool:
    """Whether two spellings of a setting are the same value: 30 and "30.0"."""
    texts = [str(value).strip().lower() for value in (one, other)]
    try:
        return float(texts[0]) == float(texts[1])
    except ValueError:
        return texts[0] == texts[1]


def _put_renamed(tree: dict[str, Any], given: Mapping[str, Any]) -> None:
    """BadSetting if an old path and its new one are set differently."""
    for old, new in ALIASES.items():
        if old in given and new in given and not _agree(given[old], given[new]):
            raise BadSetting(
                f"{old} is the old name of {new}, and both are set: {old} = {given[old]},"
                f" {new} = {given[new]}; keep {new} only"
            )
        for path in {old, new} & set(given):
            _put(tree, new, given[path], path)


def _no_setting(path: str, source: str) -> BadSetting:
    if path.startswith(ABSENT_ENGINES):
        return BadSetting(
            f"{source}: {path} is a setting of an engine this version does not have: take it out"
        )
    if rule := REMOVED.get(path):
        return BadSetting(
            f"{source}: {path} was removed: the rule {rule} decides alone; take the setting out and"
            " set the rule: "
            f'holdfast rules set "*" {rule} limit=… window=60s burstSize=…'
        )
    return BadSetting(f"{source}: there is no setting {path}")


def _put(tree: dict[str, Any], path: str, value: Any, source: str) -> None:
    """Put a value at its dotted path; text becomes a list if the setting is one."""
    kind: Any = Settings
    *parents, leaf = path.split(".")
    for part in [*parents, leaf]:
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        if part not in hints:
            raise _no_setting(path, source)
        kind = hints[part]
    if is_dataclass(kind):
        raise BadSetting(f"{source}: {path} is a group of settings, not a setting")
    if isinstance(value, str) and (listed := _listed(kind)) is not None:
        value = _tables(value, listed, path, source)
    elif isinstance(value, str) and getattr(kind, "__origin__", None) is tuple:
        value = [item.strip() for item in value.split(",") if item.strip()]
    for part in parents:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise BadSetting(f"{source}: {path} is inside a setting that the file gives as a value")
    tree[leaf] = value


def _tables(text: str, kind: Any, path: str, source: str) -> list[Any]:
    """Parse a list of groups from a variable or an option."""
    try:
        tables = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        tables = None
    if not isinstance(tables, list):
        raise BadSetting(f"{source}: {path} must be a JSON array of objects")
    for number, item in enumerate(tables):
        if isinstance(item, dict):
            _check_names(item, kind, f"{path}[{number}].", source)
    return tables


def _explain(error: str) -> str:
    """Rewrite a msgspec error ("…, at `$.gateway.x`"): path first, then what it should
    be."""
    if words := said_of(error, Settings):
        return words[1]
    reason, _, path = error.rpartition(" - at `$")
    if not reason:
        return error
    return f"{path.strip('`').lstrip('.') or 'settings'}: {reason}"
