"""A whole server and its clients on virtual time, from one seed.

- ``world``    one run: traffic and faults, healing, recording the end state
- ``options``  everything that a seed decides
- ``server``   the real gateway, sessions, ingest and fanout over memory adapters
- ``parts``    the parts of a server that a negative control may replace
- ``device``   a client: the real client machine without sockets
- ``log``      the event log as a server reads it: lost, repeated, of an old epoch
- ``network``  sockets in memory, with latency, cuts and blackholes
- ``watch``    measures the server's buffers, warnings and delivery attempts
"""

from proof.simulation.options import Options
from proof.simulation.parts import Parts
from proof.simulation.world import play

__all__ = ["Options", "Parts", "play"]
