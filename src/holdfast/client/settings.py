"""The client's bounds, each with what happens there. (Pure.)"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.bounds import positive
from holdfast.resilience import Backoff


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Defaults suit an interactive client.

    - ``buffer_messages_max``: received, not yet taken by the application. At the bound nothing more is taken in:
      the chat is marked behind and pulled again when there is room. Acks, errors and heartbeats are read on, so
      an application that awaits ``send`` inside its loop over the events cannot lock itself up.
    - ``outbox_messages_max``: unsent messages. At the bound ``send`` raises ``Unavailable``.
    - ``sends_in_flight_max``: over all chats; within a chat it is always one, which is what keeps its order.
    - ``acks_per_flush_max``: acks that leave per ``ack_interval_seconds``; the rest wait for the next.
    - ``page_messages``, ``resume_chats_per_frame``: or the server's own limit, if that is lower.
    - ``content_bytes_max``: until a server has named its own limit.
    - ``connect_timeout_seconds``: for a handshake, and for a token of the provider; then it is tried again later.
    - ``reply_timeout_seconds``: a request without an answer, and no frame that still comes in; the connection is given
      up and the request repeated.
    - ``silence_grace_seconds``: nothing at all for this long after a heartbeat was due; given up likewise.
    """

    buffer_messages_max: int = 1000
    outbox_messages_max: int = 10_000
    sends_in_flight_max: int = 32
    ack_interval_seconds: float = 0.25
    acks_per_flush_max: int = 8
    page_messages: int = 100
    resume_chats_per_frame: int = 500
    content_bytes_max: int = 4096
    connect_timeout_seconds: float = 10
    reply_timeout_seconds: float = 15
    silence_grace_seconds: float = 15
    closing_timeout_seconds: float = 5
    reconnect_initial_seconds: float = 1
    reconnect_cap_seconds: float = 16
    refresh_before_expiry_seconds: float = 60

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)
        if self.reconnect_initial_seconds > self.reconnect_cap_seconds:
            raise ValueError("reconnect_initial_seconds must not be above reconnect_cap_seconds")

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.reconnect_initial_seconds, self.reconnect_cap_seconds)
