"""The settings of streaming: pool, queue, clocks, providers, models, assistants."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from holdfast.bounds import MIB, positive
from holdfast.drivers.redis_url import check_redis_url
from holdfast.errors import BadSetting
from holdfast.message import check_id, check_tenant
from holdfast.streaming.pool.contract import DEFAULT_POOL, PoolSettings
from holdfast.streaming.providers.script import ScriptSettings

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class QueueFailoverSettings:
    """The queue of requests that cannot run yet, and retries of providers."""

    enabled: bool = True
    """False: a request that cannot run now gets 429 and Retry-After at once."""
    timeout_seconds: float = 30
    """How long a request may wait in the queue. Nothing else counts into it."""
    max_retries: int = 5
    """How many more rounds over a model's providers before the first token."""
    base_delay_ms: float = 100
    """The first delay between rounds, before full jitter; it doubles."""
    max_delay_ms: float = 5000
    """The longest delay between rounds, and the longest pause of a provider."""
    waiting_max: int = 10_000
    """Requests that may wait, over all nodes. Beyond: 503 and Retry-After."""
    waiting_per_tenant: int = 5_000
    """The same for one tenant."""
    waiting_per_user: int = 10
    """The same for one user. Beyond: 429 and Retry-After."""
    bytes_max: int = 256 * MIB
    """Request bodies that arrive, wait or run on this node. Beyond: 503."""
    bytes_per_user_max: int = 16 * MIB
    """The same for one user."""
    bytes_per_key_max: int = 128 * MIB
    """The same for one API key that names no user."""

    def __post_init__(self) -> None:
        positive(self, *(n for n in self.__slots__ if n not in ("enabled", "max_retries")))
        if self.max_retries < 0:
            raise ValueError("max_retries must not be negative")
        if self.base_delay_ms > self.max_delay_ms:
            raise ValueError("base_delay_ms must not be above max_delay_ms")


@dataclass(frozen=True, slots=True)
class ReplyClocks:
    """How long each step of a reply may take. A model may have its own."""

    headers_seconds: float = 15
    """Until a provider's response headers, for each attempt."""
    first_token_seconds: float = 60
    """Until the first token, for each attempt."""
    first_token_total_seconds: float = 120
    """Until the first token, over all attempts."""
    gap_seconds: float = 60
    """Between two signs of life of a provider; a comment or an empty chunk is one."""
    reply_seconds: float = 600
    """The whole reply from its arrival, the queue included."""
    whole_seconds: float = 280
    """The same for a request that is not streamed; then 504."""

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


@dataclass(frozen=True, slots=True)
class ReplyTimes:
    """How long replies wait for readers, and stops for replies."""

    heartbeat_seconds: float = 15
    """How often an idle stream carries a comment."""
    cancel_seconds: float = 5
    """How long a reply goes on after its last reader has left."""
    cancel_replicated_seconds: float = 30
    """The same for a reply that can be resumed."""
    slow_reader_seconds: float = 30
    """How long a reader may leave its events unread before it is closed."""
    drain_seconds: float = 20
    """How long running replies may go on while the node stops."""

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


@dataclass(frozen=True, slots=True)
class ProviderSettings:
    """Where models run."""

    name: str
    """How models, metrics and status name it."""
    kind: Literal["scripted", "openai_compatible"] = "openai_compatible"
    """``scripted`` makes up its answers, for trials and tests."""
    base_url: str = ""
    """For ``openai_compatible``: the address before ``/chat/completions``."""
    key_env: str = ""
    """The environment variable with its API key; none: no key is sent."""
    concurrency_max: int = 0
    """Generations at once, over all nodes, in a pool of its own; 0: it shares the
    default pool.
    """
    script: ScriptSettings = field(default_factory=ScriptSettings)
    """For ``scripted``: text, pace and faults."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadSetting(
                "streaming.providers: name must be 1 to 64 letters, digits, dots, dashes or"
                f" underscores, not {self.name!r}"
            )
        if problem := self._problem():
            raise BadSetting(f"streaming.providers: {self.name}: {problem}")

    def _problem(self) -> str | None:
        if self.name == DEFAULT_POOL:
            return f"{DEFAULT_POOL} is the name of the pool that providers share"
        if self.concurrency_max < 0:
            return f"concurrency_max must not be negative, not {self.concurrency_max}"
        if self.kind == "scripted":
            useless = self.base_url or self.key_env
            return "a scripted provider takes no base_url and no key_env" if useless else None
        if self.script != ScriptSettings():
            return "script is for scripted providers only"
        return _bad_base_url(self.base_url)

    @property
    def pool(self) -> str:
        """The pool whose leases its generations need."""
        return self.name if self.concurrency_max else DEFAULT_POOL


def _bad_base_url(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "base_url is malformed"
    if parts.scheme not in ("http", "https") or not host:
        return f"base_url must begin with https:// or http:// and name a host, not {url!r}"
    if parts.username is not None or parts.query or parts.fragment:
        return "base_url carries no credentials, query or fragment; the key belongs in key_env"
    return None


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model as clients name it, and the providers that run it, in order."""

    name: str
    """What clients send as ``model``."""
    providers: tuple[str, ...]
    """``provider:model``, tried in this order."""
    clocks: ReplyClocks | None = None
    """Its own clocks; none: ``streaming.clocks``."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or len(self.name) > 128:
            raise BadSetting(
                f"streaming.models: name must be 1 to 128 printable characters, not {self.name!r}"
            )
        if not self.providers:
            raise BadSetting(f"streaming.models: {self.name} has no provider")
        for line in self.providers:
            provider, _, model = line.partition(":")
            if not provider or not model:
                raise BadSetting(
                    f"streaming.models: {self.name}: providers must be provider:model, not {line!r}"
                )


@dataclass(frozen=True, slots=True)
class AssistantSettings:
    """A user of a tenant whose messages a model writes, where it is a member."""

    tenant: str
    """The tenant whose chats it is in."""
    user: str
    """The user id under which it is a member and writes."""
    model: str
    """A model of ``streaming.models``."""
    instructions: str = ""
    """The system message before the messages of the chat."""
    trigger: Literal["auto", "always", "mention"] = "auto"
    """``auto``: every text in direct chats, ``@name`` in groups."""

    def __post_init__(self) -> None:
        problem = check_id(self.user, "user") or check_tenant(self.tenant)
        if problem:
            raise BadSetting(f"streaming.assistants: {problem}")


@dataclass(frozen=True, slots=True)
class StreamingSettings:
    """AI replies. With no provider set there is one, ``scripted``, with one model."""

    pool: PoolSettings = field(default_factory=PoolSettings)
    queue_failover: QueueFailoverSettings = field(default_factory=QueueFailoverSettings)
    clocks: ReplyClocks = field(default_factory=ReplyClocks)
    times: ReplyTimes = field(default_factory=ReplyTimes)
    replies_url: str = ""
    """Where replies are kept: ``sqlite:`` (replies.db in the state directory) or
    ``redis://…``. Left empty: ``cluster.redis`` if that is set, else ``sqlite:``.
    """
    replies_bytes_max: int = 256 * MIB
    """Entries of replies in this node's memory, running and kept."""
    providers: tuple[ProviderSettings, ...] = ()
    """Where models run: ``[[streaming.providers]]`` for each; in a variable a JSON
    array.
    """
    models: tuple[ModelSettings, ...] = ()
    """What clients may ask for: ``[[streaming.models]]`` for each."""
    assistants: tuple[AssistantSettings, ...] = ()
    """Users whose messages a model writes: ``[[streaming.assistants]]`` for each."""

    def __post_init__(self) -> None:
        if self.replies_url not in ("", "sqlite:"):
            try:
                check_redis_url(self.replies_url)
            except ValueError as error:
                raise ValueError(
                    f"replies_url must be sqlite: or a URL of Redis: {error}"
                ) from None
        for path, names in (
            ("providers", [provider.name for provider in self.providers]),
            ("models", [model.name for model in self.models]),
            ("assistants", [f"{each.tenant}/{each.user}" for each in self.assistants]),
        ):
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise BadSetting(f"streaming.{path}: two are called {twice!r}")
        if self.providers and not self.models:
            raise BadSetting("streaming.models: no model uses the providers that are set")
        known = {provider.name for provider in self.providers_in_use}
        for model in self.models_in_use:
            for line in model.providers:
                if line.partition(":")[0] not in known:
                    raise BadSetting(
                        f"streaming.models: {model.name}: there is no provider"
                        f" {line.partition(':')[0]!r} in streaming.providers"
                    )
        asked = {model.name for model in self.models_in_use}
        for assistant in self.assistants:
            if assistant.model not in asked:
                raise BadSetting(
                    f"streaming.assistants: {assistant.user}: there is no model"
                    f" {assistant.model!r} in streaming.models"
                )

    @property
    def providers_in_use(self) -> tuple[ProviderSettings, ...]:
        return self.providers or (ProviderSettings("scripted", "scripted"),)

    @property
    def models_in_use(self) -> tuple[ModelSettings, ...]:
        return self.models or (ModelSettings("scripted", ("scripted:scripted",)),)
