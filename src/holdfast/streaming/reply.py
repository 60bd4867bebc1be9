"""The values of replies: entries, ids, owners, failures. (Pure.)

A *reply* is one AI answer. Its entries are numbered from 0 within an *epoch*: first
``ReplyBegin``, then deltas, and at last exactly one end, ``ReplyDone`` or
``ReplyError``. A delta is a chunk of the provider as it came, in the JSON of OpenAI's
``chat.completion.chunk``; a dialect turns entries into what its clients read.

Its *owner* started it, and nobody else sees it. Its *payer* is whom the queue, the
rates and the usage count: usually the same person; for a key that names no user, the
key.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

from holdfast.errors import HoldfastError

ReplyKind = Literal["plain", "native", "background", "assistant"]
Surface = Literal["chat", "responses", "native", "assistant"]

FailureCode = Literal[
    "cancelled",  # by its owner, an operator, or because nobody reads it
    "queue_timeout",  # waited longer than queue_failover.timeout_seconds
    "deadline",  # the whole reply took too long
    "server_shutdown",  # its node stopped as planned
    "server_restarted",  # its node had ended; found at the next start
    "worker_lost",  # its node is dead; readers report it, no log holds it
    "gap",  # entries are missing: readers report it, and a log at its bounds ends so
    "superseded",  # another node began a newer epoch of this reply
    "upstream_refused",  # the provider refused the request itself (4xx)
    "upstream_unavailable",  # no provider accepted the request
    "upstream_timeout",  # no headers, no token or a gap, for too long
    "upstream_truncated",  # ended cleanly without its end or without an answer
    "upstream_lost",  # the connection broke
    "upstream_error",  # an error inside a stream that had begun
    "upstream_garbage",  # not SSE, unparsable, too large, a redirect
    "tokens_used_up",  # the payer's token rule, checked again at the grant
    "internal",  # a defect of ours
]


class Owner(NamedTuple):
    """A user of a tenant, or an API key of it."""

    tenant: str
    kind: Literal["user", "key"]
    name: str


class Payer(NamedTuple):
    """Whom the queue, the rates and the usage count.

    ``is_key``: no person, so a person's limits do not apply.
    """

    tenant: str
    user: str
    is_key: bool = False


class EntryId(NamedTuple):
    """An entry of a reply. It is also the ``id:`` of native events: ``<epoch>-<n>``."""

    epoch: int
    n: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.n}"

    def follows(self, last: EntryId) -> bool:
        """Whether it is the next entry, or the first one of a newer epoch."""
        if self.epoch == last.epoch:
            return self.n == last.n + 1
        return self.epoch > last.epoch and self.n == 0


def parse_entry_id(text: str) -> EntryId | None:
    """The id that ``text`` spells exactly; None if it spells none."""
    epoch, dash, n = text.partition("-")
    if not dash or not _plain(epoch) or not _plain(n):
        return None
    return EntryId(int(epoch), int(n))


def _plain(digits: str) -> bool:
    """Plain decimal digits without a leading zero, at most 16."""
    if not digits.isascii() or not digits.isdigit() or len(digits) > 16:
        return False
    return digits == "0" or not digits.startswith("0")


class ReplyBegin(Struct, frozen=True, tag="begin", gc=False):
    """Entry 0: whose reply it is, who makes it, and when it was made."""

    owner_tenant: str
    owner_kind: Literal["user", "key"]
    owner_name: str
    kind: ReplyKind
    surface: Surface
    model: str
    node: str
    created_at: float
    """Wall-clock seconds."""
    request: str = ""
    """JSON that the surface's dialect needs to show the reply again; never messages."""

    @property
    def owner(self) -> Owner:
        return Owner(self.owner_tenant, self.owner_kind, self.owner_name)


class ReplyDelta(Struct, frozen=True, tag="delta", gc=False):
    """A chunk of the provider: the bytes of one JSON object, as they came, on one
    line."""

    chunk: bytes


class ReplyUsage(Struct, frozen=True, tag="usage", gc=False):
    """Token counts. ``chunk``: the provider's usage chunk as it came, or empty."""

    prompt_tokens: int
    completion_tokens: int
    estimated: bool = False
    chunk: bytes = b""


class ReplyError(Struct, frozen=True, tag="error", gc=False):
    """The end of a reply that failed. ``status``: as an HTTP answer."""

    code: FailureCode
    message: str
    status: int = 502
    body: bytes = b""
    """The provider's own error object (JSON), for ``upstream_refused``."""
    retry_after_seconds: float = 0.0
    """When to ask again, if somebody knows; else 0."""


class ReplyDone(Struct, frozen=True, tag="done", gc=False):
    """The end of a reply that is complete."""


ReplyEnd = ReplyDone | ReplyError
ReplyEntry = ReplyBegin | ReplyDelta | ReplyUsage | ReplyError | ReplyDone

_BEHIND_ALL_N = 10**15


def was_cut_short(end: ReplyEnd | None) -> bool:
    """Whether readers may have seen more than the log has: it was full, or the node was
    killed before it had written everything.
    """
    return isinstance(end, ReplyError) and end.code in ("gap", "server_restarted")


def shown_id(entry_id: EntryId, end: ReplyEnd) -> EntryId:
    """The id of an end for readers. In a log that was cut short it has the number of a
    delta that a reader may have; so there it is shown behind all entries.
    """
    return EntryId(entry_id.epoch, _BEHIND_ALL_N) if was_cut_short(end) else entry_id


class ReplyFailed(HoldfastError):
    """A reply ended with an error before anything of it was sent.

    ``error`` is its end; surfaces answer in their own shape with its ``status``.
    """

    def __init__(self, error: ReplyError) -> None:
        super().__init__(error.message, retry_after_seconds=error.retry_after_seconds or None)
        self.error = error
