"""The conformance suite for clients in any language, over real sockets.

- ``suite``      runs every scenario, one after the other, and reports
- ``subject``    the client under test: a program in any language, and how it is driven
- ``scenarios``  the failures that a client must survive, one function each
- ``together``   frames that arrive in one piece, in each order
"""
