"""A whole server and its clients on virtual time, from one seed.

``options`` what a seed decides · ``network`` sockets made of memory · ``device`` the real client machine ·
``server`` the real gateway, sessions, ingest and fanout over memory adapters · ``parts`` what a control may replace ·
``world`` the story
"""

from proof.simulation.options import Options
from proof.simulation.parts import Parts
from proof.simulation.world import play

__all__ = ["Options", "Parts", "play"]
