"""The conformance suite for clients in any language, over real sockets.

- ``suite``        runs every scenario, one after the other, and reports
- ``subject``      the client under test: a program in any language, and its driver
- ``scenarios``    lost, repeated, late and refused frames, a function each
- ``connections``  connections that close, break, hang or are refused
- ``replies``      assistants' replies that grow before they are messages
- ``together``     frames that arrive in one piece, in each order
"""
