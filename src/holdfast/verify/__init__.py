"""The promises as checkers: used by the tests and by ``holdfast verify``.

- ``history``          what clients did and saw, and what was stored: JSON lines
- ``recording``        clients that record a history
- ``checkers``         one pure function per promise: a history in, a verdict out
- ``workload``         a bounded run against a live server: ``holdfast verify URL``
- ``scripted_server``  a server that fails as a scenario says
- ``conformance``      scenarios for clients in any language: ``holdfast conformance``

Faults, the simulation and the negative controls are in ``tests/proof``.
"""
