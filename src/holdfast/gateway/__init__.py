"""The gateway holds the client connections of this node.

It accepts handshakes, carries out what each session asks for, hands every session the
messages of its chats, and drains when the node stops. The session decides the protocol.

In reading order:

- ``settings``       the settings of the gateway as a whole
- ``contract``       what a connection needs: its socket, its gateway, the node's parts
- ``handshake``      whether a client may open a WebSocket; the HTTP response if not
- ``connection``     one session's connection: carries out the session's effects
- ``memory_budget``  closes the fullest connections when too much waits for clients
- ``gateway``        all connections: delivery, timers, memory budget, drain
- ``roster_sync``    keeps the roster true, from membership events and from the store
- ``growing_replies``  shows assistants' replies to their chats while they are written
- ``cutoff``         closes connections whose credential was revoked
- ``transport/``     all that knows uvicorn or picows
"""
