"""A chat as a destination: each job's payload becomes one message, in stream order.

    transport = ChatTransport(
        "https://chat.example.com", tenant_key, act_as="shop", source="shop-eu"
    )
    async with transport as chats:
        handlers.carry("chat", chats)
        async with Worker(store, handlers).running(): ...

    await enqueue(
        connection,
        JobDraft("Shipped", b"On its way.", stream=chat, destination=f"chat:{chat}"),
    )

A chat is a topic of the event log (docs/decisions/0020), and REST is how another
process writes to it. The server keeps the first message under an idempotency key and
answers a repetition with it. So a run that is repeated after a crash or a lost reply
adds nothing.
"""

from __future__ import annotations

from types import TracebackType
from urllib.parse import quote

import aiohttp
import msgspec

from holdfast.clock import SystemClock
from holdfast.drivers.outbound_http import open_session
from holdfast.errors import BadSetting
from holdfast.resilience import retry_after_seconds
from holdfast.wire.frames import Error, ErrorBody
from holdfast.work.failures import JobFailed
from holdfast.work.handlers import Context
from holdfast.work.job import Reason

_ANSWER_BYTES_MAX = 64 << 10
_encode = msgspec.json.Encoder().encode


class _Send(msgspec.Struct, frozen=True):
    content: str
    content_type: str


class ChatTransport:
    """A transport for ``Handlers.carry``. The address is a chat's id; the payload is
    the message's content in UTF-8, of the given ``content_type``.

    ``credential`` is a user token, or a tenant key with ``act_as``, the sender; the
    sender must be a member of the chat. ``source`` names this job store among all that
    send as the same user. Source and job key form the idempotency key, so ``source``
    must never change. Enter the transport inside the event loop; leaving it closes its
    connections.
    """

    def __init__(
        self,
        url: str,
        credential: str,
        *,
        source: str,
        act_as: str = "",
        content_type: str = "text/plain",
        timeout_seconds: float = 10.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise BadSetting(f"{url!r} is not the address of a server")
        if not credential or not source:
            raise BadSetting("a credential and a source are needed")
        if timeout_seconds <= 0:
            raise BadSetting("timeout_seconds must be greater than 0")
        self._url, self._source, self._content_type = url.rstrip("/"), source, content_type
        self._headers = {
            "authorization": f"Bearer {credential}",
            "content-type": "application/json",
        }
        if act_as:
            self._headers["x-act-as"] = act_as
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ChatTransport:
        self._session = open_session(headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, ctx: Context, address: str) -> None:
        """Return when the message is durable, or raise JobFailed. Safe to repeat."""
        if self._session is None:
            raise BadSetting("enter the transport (`async with`) before its worker runs")
        try:
            body = _encode(_Send(ctx.job.payload.decode(), self._content_type))
        except UnicodeDecodeError as error:
            raise JobFailed(
                Reason.SERIALIZATION_ERROR, f"the payload is no text: {error}"
            ) from error
        url = f"{self._url}/v1/chats/{quote(address, safe='')}/messages"
        key = {"idempotency-key": f"{self._source}-{ctx.key}"}
        try:
            async with self._session.post(
                url, data=body, headers=key, allow_redirects=False
            ) as answer:
                text = await answer.content.read(_ANSWER_BYTES_MAX)
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            message = f"no answer from {self._url}: {type(error).__name__}: {error}"
            raise JobFailed(Reason.TRANSPORT_UNAVAILABLE, message) from error
        wait = retry_after_seconds(answer.headers.get("retry-after", ""), SystemClock.now())
        failure = judged(answer.status, text, wait or 0.0)
        if failure is not None:
            raise failure


def judged(status: int, text: bytes, wait: float) -> JobFailed | None:
    """The failure that a response means for the job; None: the message is stored.

    A refused message would be refused again: it becomes a dead letter, to be replayed
    when the chat is fixed. A refused credential affects every job: they wait, without a
    strike, until it is fixed.
    """
    if status in (200, 201):
        return None
    error = _error(text)
    message = f"{status} {error.code}: {error.message}"[:300]
    if status == 429:
        return JobFailed(Reason.THROTTLED, message, retry_after_seconds=wait)
    if status < 400 or status >= 500 or error.code in ("", "UNAUTHORIZED", "FORBIDDEN"):
        return JobFailed(Reason.DEPENDENCY_FAILURE, message, retry_after_seconds=wait)
    return JobFailed(Reason.VALIDATION_FAILURE, message)


def _error(text: bytes) -> Error:
    """The error in a response; without a code if a proxy or another server answered."""
    try:
        return msgspec.json.decode(text, type=ErrorBody).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Error("", text[:200].decode("utf-8", "replace"), retryable=False)
