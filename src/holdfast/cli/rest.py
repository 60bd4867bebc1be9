"""The REST client of the commands, on the standard library: httpx would slow the start.

Every failure is one of our errors and says what to do.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from holdfast.errors import (
    BadSetting,
    HoldfastError,
    InvalidMessage,
    OutcomeUnknown,
    Unavailable,
    error_of,
)
from holdfast.wire.frames import ErrorBody

ANSWER_BYTES_MAX = 32 * 1024 * 1024


class RestClient:
    """A server's REST API for one credential. Each request opens its own connection."""

    def __init__(self, url: str, credential: str, timeout_seconds: float = 30.0) -> None:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise BadSetting(
                f"{url!r} is no server address; it should look like http://127.0.0.1:8080"
            )
        self.url = url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._host = parts.netloc
        self._prefix = parts.path.rstrip("/")
        self._credential = credential
        self._timeout = timeout_seconds

    def get(self, *path: str, **query: Any) -> Any:
        given = {name: value for name, value in query.items() if value is not None}
        return self.ask("GET", _join(path) + (f"?{urlencode(given)}" if given else ""))

    def post(self, *path: str, body: Mapping[str, Any], key: str | None = None) -> Any:
        return self.ask("POST", _join(path), body, {"Idempotency-Key": key} if key else {})

    def delete(self, *path: str, **query: Any) -> Any:
        return self.ask("DELETE", _join(path) + (f"?{urlencode(query)}" if query else ""))

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the decoded response; raise one of our errors for any other status."""
        with self.open(method, path, body, headers) as response:
            return self._answer(response.status, response.read(ANSWER_BYTES_MAX), path)

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """The response of a good status, to be read in the block; else our errors.

        They are raised for what fails in the block as well.
        """
        sent = {
            "Authorization": f"Bearer {self._credential}",
            "Accept": "application/json",
            **(headers or {}),
        }
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, timeout=self._timeout)
        try:
            data = None if body is None else msgspec.json.encode(body)
            if data is not None:
                sent["Content-Type"] = "application/json"
            connection.request(method, self._prefix + path, data, sent)
            response = connection.getresponse()
            if response.status >= 300:
                self._answer(response.status, response.read(ANSWER_BYTES_MAX), path)
            yield response
        except ValueError:  # its text may carry a secret
            raise InvalidMessage(
                "this cannot be sent, and was not: texts must be UTF-8, keys and tokens plain ASCII"
                " on one line"
            ) from None
        except (ConnectionRefusedError, socket.gaierror) as error:
            raise Unavailable(
                f"there is no server at {self.url} ({error.strerror}): start one with `holdfast"
                " serve`, or name its address with --url or HOLDFAST_URL"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise OutcomeUnknown(
                f"the server at {self.url} did not answer ({error or type(error).__name__}): "
                "ask again, or look at its log"
            ) from None
        finally:
            connection.close()

    def _answer(self, status: int, data: bytes, path: str) -> Any:
        if 200 <= status < 300:
            try:
                return msgspec.json.decode(data) if data else None
            except msgspec.DecodeError:
                raise self._no_server() from None
        try:
            detail = msgspec.json.decode(data, type=ErrorBody).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            if status == 503 and b'"not_ready"' in data:  # the answer of /health/ready
                raise Unavailable(f"the server at {self.url} is not ready") from None
            if status == 403 and path.startswith("/admin"):
                raise Unavailable(
                    f"the proxy at {self.url} lets no operator through (status 403): name a node's"
                    " own address instead"
                ) from None
            raise self._no_server(status) from None
        raise error_of(
            detail.code,
            detail.message,
            outcome=detail.outcome,
            retry_after_seconds=detail.retry_after_seconds,
            details=detail.details,
        )

    def _no_server(self, status: int = 200) -> HoldfastError:
        return Unavailable(
            f"what answers at {self.url} is no Holdfast server (status {status}); check --url"
        )


def _join(path: tuple[str, ...]) -> str:
    """The first part is a path as it is; the others are segments, escaped."""
    return "/".join([path[0], *(quote(part, safe="") for part in path[1:])])
