"""A session decides what one client may do next and what it must be sent. (Pure.)

Each method takes one event (a frame, a delivery, a result, the time) and returns
effects for the gateway's connection to carry out. There are no sockets, clocks or tasks
here.

In reading order:

- ``session``        the events of a connection's life, in their order
- ``effects``        what a session asks its connection to do
- ``validation``     whether a frame makes sense by itself
- ``scopes``         which scopes of the credential each frame needs
- ``requests``       rate limits of a connection, open requests; acks, reads, typing
- ``pulls``          sync and resume requests, one at a time
- ``responses``      the frames that open, answer, resume and close
- ``outbound``       what the client must be sent: the buffer, and delivery's hot path
- ``progress``       how far the connection is in each chat: live or behind
- ``lanes``          the frames that wait to be written, and their order
- ``growing_reply``  an assistant's text while it is written, and its frames
- ``slow_consumer``  the state machine from a full buffer to recovery or a close
- ``heartbeat``      is the client there; which chats lag; whose acks are stale
- ``lifetime``       closes a connection at a deadline: slow, idle or silent client
- ``work_rate``      how many frames a client may have handled before reading pauses
- ``roster``         which sessions are on this node, by user and by chat
- ``settings``       the bounds of one connection
"""
