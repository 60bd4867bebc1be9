"""The client's bounds, and what happens at each. (Pure.)"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.bounds import positive
from holdfast.resilience import Backoff


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The defaults suit an interactive client.

    - ``buffer_messages_max``: messages that the application has not taken yet. At the
      bound no more are taken: the chat is behind and is pulled when there is room.
      Acks, errors and heartbeats are still read, so an application that awaits ``send``
      inside its loop over the events does not block itself.
    - ``outbox_messages_max``: unsent messages. At the bound ``send`` raises
      ``Unavailable``.
    - ``sends_in_flight_max``: over all chats; within a chat it is always one, which
      keeps its order.
    - ``acks_per_flush_max``: acks per ``ack_interval_seconds``; the rest wait for the
      next interval.
    - ``page_messages``, ``resume_chats_per_frame``: or the server's limit, if lower.
    - ``content_bytes_max``: until the server has named its own limit.
    - ``connect_timeout_seconds``: for a handshake, and for a token from the provider;
      then the client retries later.
    - ``reply_timeout_seconds``: for the reply to a request, while no frame is arriving;
      then the client drops the connection and repeats the request.
    - ``silence_grace_seconds``: for any byte, from when a heartbeat is due; then the
      client drops the connection.
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
