"""HTTP and WebSockets on one port: all that knows uvicorn or picows.

In reading order:

- ``server``     the listening socket, and uvicorn's server on it
- ``http``       uvicorn's HTTP protocol with bounds, deadlines and our refusals
- ``lean``       what uvicorn keeps for each connection, in less memory
- ``responses``  HTTP responses as bytes, in one write each
- ``upgrade``    from an upgrade request to a connection or a refusal
- ``port``       hands an accepted handshake's connection over to picows
- ``websocket``  between picows and a connection: fragments, pings, raw writes
- ``linger``     closes so that the client can read the last frame
"""
