"""docs/reference/settings.md: every setting, its type, its default and what happens at the limit.

Paths, types and defaults come from ``holdfast.settings``; what a value means stands in NOTES. A setting without a note
has what stands under it in the source, or what its group's docstring says. ``page`` refuses to be written when a note
has no setting.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_type_hints

from holdfast.settings import UNUSED_WITHOUT_ENGINES, Settings, paths

BREAKER = {
    "failure_threshold": "failures within the window that open the breaker",
    "failure_window_seconds": "how far back failures count",
    "open_duration_seconds": "how long calls are refused at once (SERVICE_UNAVAILABLE + retry_after_seconds) before a probe",
    "half_open_probe_count": "probes that must succeed before the breaker closes; one failed probe opens it again",
    "min_failure_ratio": "the failures must also be this share of the calls; 0 opens by the count alone",
}

NOTES: dict[str, str] = {
    "server.host": "Where to listen. An address that other machines can reach is refused unless `server.trusted_proxies` names the TLS proxy in front.",
    "server.port": "The one port for HTTP and WebSocket; 0 takes a free one and prints it. A busy port stops the start and says so.",
    "server.state_dir": "Everything that is kept. Left empty: `$XDG_STATE_HOME/holdfast`, without that variable `~/.local/state/holdfast`. One process at a time: a second one is refused and told the first one's process id.",
    "server.trusted_proxies": "Networks whose X-Forwarded-For is believed. Anybody else is counted by their own address.",
    "server.allowed_origins": "Further origins whose pages may connect, exactly as browsers send them; others get 403. `*` is refused.",
    "server.log_format": "`json` for machines, `text` for people; always on stderr.",
    "server.log_level": "Quieter lines are not written.",
    "server.node_id": "This node's name in status, traces, jobs and among the nodes that share limits: each must have its own. Left empty, a new one is made at every start.",
    "access.tokens.issuer": "A token of another `iss` is refused (401).",
    "access.tokens.audience": "A token of another `aud` is refused (401).",
    "access.tokens.leeway_seconds": "How far clocks may differ when `exp`, `nbf` and `iat` are judged.",
    "access.tokens.default_tenant": "The tenant of a token that names none; `null` (in YAML) refuses such tokens.",
    "access.tokens.ttl_seconds_max": "The longest lifetime this server mints; asking for more is refused.",
    "access.connections.connections_max": "Connections of this node. The next handshake: 503 + Retry-After.",
    "access.connections.per_address_max": "Connections of one address (IPv6: of one /64). The next handshake: 503 + Retry-After.",
    "access.connections.per_tenant_max": "Connections of one tenant. The next handshake: 503 + Retry-After.",
    "access.http.connections_max": "HTTP connections of this node: all that are no WebSocket (yet). The next: 503 + Retry-After before it has asked, and it is closed.",
    "access.http.per_address_max": "HTTP connections from one address (IPv6: one /64), as the socket shows it: X-Forwarded-For comes with a request, later. Not for declared proxies, whose connections serve many people; bound those at the proxy. The next: 503 + Retry-After, closed.",
    "access.handshakes_per_ip_per_minute": "The next one: 429 + Retry-After.",
    "api.body_bytes_max": "A longer request body: 413, and it is not read.",
    "api.body_seconds_max": "A body that takes longer to arrive: 400.",
    "api.request_seconds_max": "The deadline of a REST request; everything behind it gets what is left.",
    "api.user_rate_per_second": "REST requests of one user. Above: 429 + Retry-After.",
    "api.user_burst": "So many at once before the rate counts.",
    "api.tenant_rate_per_second": "REST requests of one tenant. Above: 429 + Retry-After.",
    "api.tenant_burst": "So many at once before the rate counts.",
    "api.failed_logins_per_minute": "Per address; beyond it a bad credential is answered 429 instead of 401.",
    "api.metrics_without_key": "Serve /metrics to anybody who can reach the port.",
    "gateway.backpressure.inbound.rate_limit_per_second": "Sends of one connection. Above: RATE_LIMITED + retry_after_seconds; nothing is queued.",
    "gateway.backpressure.inbound.rate_limit_burst": "So many sends at once before the rate counts.",
    "gateway.backpressure.inbound.other_rate_limit_per_second": "All other frames of one connection, pings included. Above: RATE_LIMITED, told at most once a second for frames that expect no answer.",
    "gateway.backpressure.inbound.other_rate_limit_burst": "So many frames at once before the rate counts.",
    "gateway.backpressure.inbound.max_queue_depth": "Requests of one connection without an answer. The next: SERVER_BUSY.",
    "gateway.backpressure.inbound.max_queue_age_seconds": "How long a sync or resume waits for its turn, then SERVER_BUSY.",
    "gateway.backpressure.inbound.max_message_size_bytes": "Content of a message in UTF-8, by socket and REST alike. Above: MESSAGE_TOO_LARGE.",
    "gateway.backpressure.inbound.max_frame_bytes": "A larger frame closes the connection (protocol_error, 4501).",
    "gateway.backpressure.inbound.max_fragments": "Fragments of one message. More close the connection (4501).",
    "gateway.backpressure.inbound.max_invalid_frames": "So many within the window close the connection (4501); each is answered before.",
    "gateway.backpressure.inbound.invalid_frames_window_seconds": "How far back invalid frames count.",
    "gateway.backpressure.outbound.max_buffer_messages": "Deliveries that may wait for one connection; the thresholds below are percent of it.",
    "gateway.backpressure.outbound.max_buffer_bytes": "Their bytes; whichever is fuller counts.",
    "gateway.backpressure.outbound.warning_threshold_percent": "Above: logged once. Drained below it a slow client is well again and gets a `resync`.",
    "gateway.backpressure.outbound.critical_threshold_percent": "Above: `error SLOW_CONSUMER`, heads instead of messages, the grace starts.",
    "gateway.backpressure.outbound.grace_period_seconds": "Without a new low for so long: `connection_closing` with from where to sync, close 4002.",
    "gateway.backpressure.outbound.grace_total_seconds": "The longest grace, however steadily the client drains.",
    "gateway.backpressure.outbound.new_low_percent": "A low counts as new, and starts the grace again, if it is this much under the last.",
    "gateway.backpressure.outbound.ephemeral_threshold_percent": "Above: typing, presence and receipts are dropped for this connection.",
    "gateway.backpressure.outbound.max_control_frames": "Answers that wait for one connection. Then its socket is not read until half have left.",
    "gateway.backpressure.outbound.max_ephemeral_frames": "Ephemeral frames that wait for one connection; the oldest key goes.",
    "gateway.backpressure.outbound.socket_send_buffer_bytes": "SO_SNDBUF of each connection: what a stopped reader can hide in the kernel.",
    **{f"gateway.circuit_breaker.{name}": f"Writes: {note}." for name, note in BREAKER.items()},
    **{f"limits.limiter.batch.breaker.{name}": f"The shared counters: {note}." for name, note in BREAKER.items()},
    "gateway.timeouts.durability_rpc_seconds": "The deadline of a send, passed inward. Then SERVICE_UNAVAILABLE: outcome unknown if a commit was under way, else rejected.",
    "gateway.timeouts.heartbeat_interval_seconds": "How often a client is asked whether it is there, the store for heads, and the registry is told who is here.",
    "gateway.timeouts.heartbeat_timeout_seconds": "No answer for so long, while no bytes leave either: close idle_timeout (4001).",
    "gateway.timeouts.authentication_seconds": "A socket without a credential for so long: close unauthorized (4502).",
    "gateway.timeouts.rotation_seconds": "An older connection is closed (rotation, 4004) and comes back; spread by 5 %.",
    "gateway.timeouts.behind_before_heads_seconds": "A chat whose head has been ahead of the connection for so long is named in the heartbeat.",
    "gateway.timeouts.stale_acks_seconds": "Acks that stay behind for so long: one `resync`; again so long: close state_diverged (4006).",
    "gateway.timeouts.overload_window_seconds": "SERVER_BUSY on more than half of the requests of a window: close overloaded (4005).",
    "gateway.timeouts.overload_requests_min": "Fewer requests in a window are not judged.",
    "gateway.pages.default_messages": "Messages of a sync page whose request names no limit.",
    "gateway.pages.max_messages": "The largest limit a request may name. Above: INVALID_MESSAGE.",
    "gateway.pages.max_bytes": "A page ends here if its messages are large; `has_more` says so.",
    "gateway.pages.resume_chats_per_frame": "Cursors of one `resume` frame. Above: INVALID_MESSAGE.",
    "gateway.pages.resume_chats_max": "Cursors of one resume in all its frames. Above: INVALID_MESSAGE.",
    "gateway.shutdown.drain_timeout_seconds": "How long a drain waits for open requests; what is left is answered `unknown` and closed (server_shutdown, 4000).",
    "gateway.memory_budget_bytes": "Bytes in all outbound buffers of this node; 0 is a quarter of the machine's memory. Above: the fullest connections are shed (memory_pressure, 4003).",
    "gateway.reconnect_spread_seconds": "Clients that are sent away together are asked to return spread over so long.",
    "gateway.upstream_failure_close_seconds": "Writes refused by the breaker for so long: close every connection (upstream_failure, 4007). 0: never; sends fail fast and deliveries go on.",
    "gateway.connections_per_user": "One device more closes the user's oldest connection (duplicate_connection, 4500).",
    "durability.intake.max_waiting": "Sends that wait for their group, in all. The next: SERVER_BUSY.",
    "durability.intake.max_waiting_per_chat": "In one chat. The next: SERVER_BUSY; other chats go on.",
    "durability.intake.max_waiting_bytes": "Their content. The next: SERVER_BUSY.",
    "durability.intake.max_age_seconds": "A send that waited longer was not tried: SERVER_BUSY.",
    "durability.intake.max_group_sends": "Sends of one commit; the rest is the next group.",
    "durability.intake.max_group_bytes": "Content of one commit; the rest is the next group.",
    "durability.intake.hot_messages_per_minute": "A chat above it is hot: counted in `holdfast_hot_chats`, listed by `holdfast chat list --hot`. It is slowed by nothing.",
    "durability.changes.max_at_once": "Changes of chats and members under way, by REST and operators. The next: SERVER_BUSY with the limit.",
    "durability.history.max_reads": "Reads at once, four for each reader; more wait for `max_wait_seconds`, tenants in turn.",
    "durability.history.max_resumes": "Resumes at once; more wait for `max_wait_seconds`, tenants in turn.",
    "durability.history.max_wait_seconds": "A read or resume that waited longer: SERVER_BUSY.",
    "durability.history.read_timeout_seconds": "One read. Beyond: a retryable SERVICE_UNAVAILABLE; a resume answers with what it has, and heads.",
    "durability.history.request_timeout_seconds": "A sync or a resume is answered by then, however many reads it takes.",
    "durability.history.raise_interval_seconds": "A client's proof of a rollback raises a chat's epoch at most so often.",
    "durability.history.resume_page_messages": "Messages of each chat's first page in `resumed`.",
    **{f"durability.history.breaker.{name}": f"Reads: {note}." for name, note in BREAKER.items()},
    "durability.watermarks.flush_interval_seconds": "Delivered and read marks are merged in memory and written so often.",
    "durability.watermarks.max_waiting": "Different marks that wait. Further ones are dropped and counted; the device's next one replaces them.",
    "durability.watermarks.max_per_write": "Marks of one commit.",
    "durability.chats.members_max": "Members of a chat. The next: FORBIDDEN with the limit.",
    "durability.chats.members_at_creation_max": "Members a chat may be created with, its creator included. Above: INVALID_MESSAGE with the limit.",
    "durability.chats.chats_per_user_max": "Chats of one user. The next: FORBIDDEN with the limit.",
    "durability.chats.devices_per_member_max": "Devices whose watermarks are kept per chat and member. Above: the one furthest behind is merged into the one without a name.",
    "durability.keys.idempotency_ttl_days": "How long the key of a message (`client_message_id`) is remembered. 0: as long as the message. With a number, a client that was away for longer stores a message twice. The seed's rule is 7.",
    "durability.keys.answers_ttl_days": "How long the answer to a REST change with an `Idempotency-Key` (other than a send) is remembered, at least. After that the same key is a new request.",
    "durability.chats.name_characters_max": "Characters of a chat's name. Above: INVALID_MESSAGE.",
    "durability.sqlite.synchronous": "FULL: a commit is on stable storage. NORMAL loses acknowledged messages at a power cut; it exists to prove that.",
    "durability.sqlite.readers": "Threads that read, at most 64; they never wait for the writer.",
    "durability.sqlite.writes_waiting_max": "Writes that wait for the one writer. The next: SERVER_BUSY.",
    "durability.sqlite.reads_waiting_max": "Reads that wait for a reader. The next: SERVICE_UNAVAILABLE.",
    "durability.sqlite.read_deadline_seconds": "A read that takes longer is interrupted: SERVICE_UNAVAILABLE, or a shorter page with has_more.",
    "durability.sqlite.busy_timeout_seconds": "How long to wait, at most 60, if another program holds the file; then SERVICE_UNAVAILABLE. Nothing of ours does.",
    "durability.sqlite.checkpoint_pages": "The write-ahead log is folded into the database after so many pages, at most 1,000,000.",
    "durability.sqlite.cache_bytes": "The writer's page cache.",
    "durability.dynamodb.retry.max_attempts": "Tries of a throttled call.",
    "durability.dynamodb.retry.initial_backoff_ms": "The first wait between them.",
    "durability.dynamodb.retry.max_backoff_ms": "The longest wait between them.",
    "durability.dynamodb.transaction_conflict.max_attempts": "Tries of a group that met another writer.",
    "durability.dynamodb.transaction_conflict.jitter_ms": "The first wait between them.",
    "durability.kafka.producer.acks": "Only `all` is accepted.",
    "durability.kafka.producer.timeout_ms": "Capped below the gateway's deadline, whatever is set.",
    "durability.kafka.producer.retries": "Tries of a publish.",
    "durability.kafka.producer.retry_backoff_ms": "The wait between them.",
    "fanout.kafka.consumer.group_id": "The consumer group.",
    "fanout.kafka.consumer.max_poll_records": "Entries read from the event log at once, whichever log it is.",
    "fanout.kafka.consumer.enable_auto_commit": "Only `false` is accepted: a position moves after the attempt.",
    "fanout.retry.max_attempts": "Tries of a hand-over to a gateway, the first included; then it is skipped and counted, and sync heals it.",
    "fanout.retry.initial_backoff_ms": "The first wait between tries.",
    "fanout.retry.max_backoff_ms": "The longest wait between tries.",
    "fanout.dlq.topic": "Where unusable events go.",
    "fanout.dlq.alert_threshold_per_hour": "More dead letters in an hour of the clock: one critical line in the log.",
    "fanout.dlq.max_letters": "Dead letters remembered for `holdfast status`; older ones are forgotten, the events stay in the log.",
    "fanout.ephemeral.interval_seconds": "Typing, presence and receipts of one user and chat leave at most once per interval; the newest wins.",
    "fanout.ephemeral.typing_seconds": "Typing ends by itself after so long.",
    "fanout.ephemeral.max_chat_members": "Larger chats get no typing, presence or receipts.",
    "fanout.ephemeral.max_waiting": "Notes that wait. Further ones are dropped and counted.",
    "fanout.ephemeral.max_presence_chats": "A user's presence is told in so many of their chats.",
    "fanout.ephemeral.max_presences": "Users whose presence is told per round; the rest is told in the next.",
    "fanout.ephemeral.max_last_seen": "Users whose last presence is remembered; the longest unused is forgotten.",
    "fanout.ephemeral.lookup_timeout_seconds": "How long to wait for a chat's members; then the note is dropped.",
}  # fmt: skip

INTRODUCTION = """# Settings

Written by `docs/generate.py` from `holdfast.settings`; do not edit.

Every setting has a default, and with nothing configured all are at it. The later source wins: defaults, a file
(`holdfast serve -c holdfast.toml`; TOML or YAML), `HOLDFAST_…` variables with `__` between the parts of a path
(`HOLDFAST_GATEWAY__SHUTDOWN__DRAIN_TIMEOUT_SECONDS=10`), options (`--set PATH=VALUE`, `--host`, `--port`,
`--state-dir`). `HOLDFAST_HOST`, `HOLDFAST_PORT` and `HOLDFAST_STATE_DIR` are short for `server.…`. Lists in variables
are separated by commas.

A setting that does not exist, has the wrong type or is out of range stops the start with its path and the reason;
nothing is ignored. What differs from its default is listed at start, in `holdfast status` and as
`holdfast_setting_changed{path}`.

```toml
[server]
host = "0.0.0.0"
trusted_proxies = ["10.0.0.5/32"]

[gateway.backpressure.inbound]
rate_limit_per_second = 20
```
"""


def page() -> str:
    known = dict(paths())
    assert set(NOTES) <= set(known), f"notes without a setting: {set(NOTES) - set(known)}"
    lines = [INTRODUCTION]
    group = ""
    for path, default in known.items():
        head, _, _ = path.rpartition(".")
        if head != group:
            group = head
            lines += ["", f"## {group}", "", "| setting | type | default | what happens |", "|---|---|---|---|"]
        idle = (
            " *Accepted; without effect until that engine exists.*" if path.startswith(UNUSED_WITHOUT_ENGINES) else ""
        )
        name = path.removeprefix(f"{head}.")
        lines.append(
            f"| `{name}` | {_type(path)} | {_default(default)} | {NOTES.get(path) or _docstring(path)}{idle} |"
        )
    return "\n".join(lines) + "\n"


def _docstring(path: str) -> str:
    """What stands under the field in its class, or what its class says."""
    group, _, name = path.rpartition(".")
    kind = _kind(group)
    text = _under_fields(kind).get(name) or inspect.getdoc(kind) or ""
    return " ".join(text.split()).replace("``", "`")


def _under_fields(kind: Any) -> dict[str, str]:
    """The texts that follow the fields of a class in its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: text.value.value
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _kind(path: str) -> Any:
    kind: Any = Settings
    for part in path.split("."):
        kind = get_type_hints(kind)[part]
    return kind


def _type(path: str) -> str:
    kind = _kind(path)
    if kind in (int, float, str, bool):
        return {int: "integer", float: "number", str: "text", bool: "true or false"}[kind]
    return {"tuple[str, ...]": "list of texts", "str | None": "text"}.get(str(kind), " or ".join(_choices(kind)))


def _choices(kind: Any) -> Iterator[str]:
    for choice in kind.__args__:
        yield f"`{str(choice).lower() if isinstance(choice, bool) else choice}`"


def _default(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case ():
            return "none"
        case int() | float():
            return f"{value:,}"
        case _:
            return f"`{value}`"
