"""One to three nodes and their clients on virtual time, from one seed.

- ``world``         one run: traffic and faults, healing, recording the end state
- ``options``       everything that a seed decides
- ``people``        users and operators: they send, read, and change chats
- ``disturbances``  the faults of connections, nodes and engines
- ``server``        one life of a node: the real parts over memory adapters
- ``parts``         the parts of a node that a negative control may replace
- ``link``          how a node reaches what all share: cut, in one direction, dead
- ``disk``          the store and its log, which a failover may set back
- ``log``           the sharded log; as a feed reads it: lost, repeated, of an old epoch
- ``shared``        bus and registry, which fail, forget and go back
- ``reader``        the durable reader of the log, its jobs and its lease
- ``device``        a client: the real client machine without sockets
- ``network``       sockets in memory, with latency, cuts and blackholes
- ``watch``         measures a node's buffers, warnings and delivery attempts
"""

from proof.simulation.options import Options
from proof.simulation.parts import Parts
from proof.simulation.world import play

__all__ = ["Options", "Parts", "play"]
