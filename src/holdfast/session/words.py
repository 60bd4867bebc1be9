"""What a session says when it opens, answers a send and closes. (Pure.)"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.message import Acked
from holdfast.session.limits import SessionSettings
from holdfast.wire.closing import CloseReason
from holdfast.wire.frames import PROTOCOL_VERSION, ConnectionClosing, ConnectionEstablished, MessageAck


def established_frame(
    limits: SessionSettings, connection_id: str, user_id: str, device_id: str, at: str
) -> ConnectionEstablished:
    return ConnectionEstablished(
        connection_id=connection_id,
        user_id=user_id,
        device_id=device_id,
        server_time=at,
        heartbeat_interval_ms=int(limits.timeouts.heartbeat_interval_seconds * 1000),
        protocol_version=PROTOCOL_VERSION,
        limits=limits.announced(),
    )


def acknowledgement(client_message_id: str, acked: Acked) -> MessageAck:
    message = acked.message
    return MessageAck(
        client_message_id,
        message.message_id,
        message.chat_id,
        message.sequence,
        message.created_at,
        acked.deduplicated,
    )


def closing_frame(
    closing: CloseReason, message: str | None, reconnect_delay_ms: int, sync_from: Mapping[str, int]
) -> ConnectionClosing:
    return ConnectionClosing(
        reason=closing.reason,
        message=message or closing.message,
        reconnect_allowed=closing.reconnect_allowed,
        reconnect_delay_ms=reconnect_delay_ms,
        sync_from_sequence=sync_from,
    )
