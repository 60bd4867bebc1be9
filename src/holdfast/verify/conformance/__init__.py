"""The conformance suite for clients in any language, over real sockets.

- ``subject``    the client under test: what a scenario asks of it, and how a program of any language provides it
- ``scenarios``  the failures that a client must survive, one function each
- ``together``   frames that arrive in one piece, in each order: a client must not handle an answer late
- ``suite``      every scenario, run one after the other, and what came of it
"""
