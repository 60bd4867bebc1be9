"""The gateway: connections, and what sessions notice."""

from __future__ import annotations

from holdfast.telemetry.logs import log
from holdfast.telemetry.marks import sometimes
from holdfast.telemetry.metrics import counter, gauge

_connections = gauge("gateway_connections_active", "Open connections [gateway.connections.active]")
_connected = counter("gateway_connections", "Connections opened [gateway.connections.rate]")
_closed = counter("gateway_closed", "Connections closed by the server, by reason", ("reason",))
_lost = counter("gateway_connections_lost", "Connections that ended without a closing of ours")
_timeouts = counter("gateway_connection_timeouts", "Connections closed for silence [gateway.connection.timeout]")
_slow_disconnects = counter(
    "gateway_slow_consumer_disconnects", "Slow consumers closed [gateway.slow_consumer.disconnects]"
)
_forced_resyncs = counter(
    "client_resync_forced",
    "Closes and resyncs that make a client pull, planned closes apart [client.resync.forced_rate]",
)
_signs = counter("gateway_signs", "What sessions noticed, by sign", ("sign",))
_refused_frames = counter("gateway_frames_refused", "Frames that could not be decoded")
_refused_handshakes = counter("gateway_handshakes_refused", "Handshakes refused, by status", ("status",))
_http_connections = gauge("gateway_http_connections_active", "Open connections that are no WebSocket")
_refused_http_connections = counter(
    "gateway_http_connections_refused", "HTTP connections refused because their address or the node holds its most"
)
_shed_http_connections = counter(
    "gateway_http_connections_shed", "HTTP connections cut off above the memory budget, because they read no answer"
)
_outbound = gauge("gateway_outbound_buffer_bytes", "Bytes that wait in all outbound buffers, HTTP answers too")

_FORCED_CLOSES = frozenset({"slow_consumer", "memory_pressure", "state_diverged", "overloaded"})
_FORCED_PULLS = frozenset({"delivery_skipped", "acks_stale"})


def connection_opened(active: int) -> None:
    _connected.inc()
    _connections.set(active)


def connection_ended(active: int) -> None:
    _connections.set(active)


def connection_closed(reason: str) -> None:
    """The server closes a connection."""
    sometimes("a connection was closed", reason)
    _closed.labels(reason).inc()
    if reason == "slow_consumer":
        _slow_disconnects.inc()
    elif reason == "idle_timeout":
        _timeouts.inc()
    if reason in _FORCED_CLOSES:
        _forced_resyncs.inc()


def connection_lost() -> None:
    """The client or the network ended it."""
    _lost.inc()


def session_noticed(sign: str) -> None:
    sometimes("a session noticed", sign)
    _signs.labels(sign).inc()
    if sign in _FORCED_PULLS:
        _forced_resyncs.inc()


def frame_refused() -> None:
    _refused_frames.inc()


def handshake_refused(status: int) -> None:
    _refused_handshakes.labels(str(status)).inc()


def http_connections(active: int) -> None:
    _http_connections.set(active)


def http_connection_shed() -> None:
    _shed_http_connections.inc()


def http_connection_refused() -> None:
    _refused_http_connections.inc()


def outbound_buffers(waiting_bytes: int) -> None:
    _outbound.set(waiting_bytes)


def unread(what: str, many: int, error: Exception) -> None:
    """Heads or memberships could not be read from the store; the next heartbeat interval asks again."""
    log.warning(f"{what} unread", many=many, error=str(error))
