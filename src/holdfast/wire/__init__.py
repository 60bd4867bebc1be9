"""The protocol in bytes: what is said on a WebSocket, and how it is encoded. (Pure.)

In reading order:

- ``frames``       every frame of the protocol, typed; the protocol reference comes from
                   it
- ``close_codes``  why the server closes a connection, and whether to reconnect
- ``codec``        bytes to frames and back; ``EncodedRun``, encoded once for all
                   receivers
- ``assembler``    WebSocket fragments to whole messages
"""
