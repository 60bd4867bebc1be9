"""The metrics and named events we emit, one function each, one file per part; nothing else in Holdfast names a metric.

Names are the seeds' dotted names made Prometheus-like; HELP texts carry the dotted name in brackets, and
``docs/reference/metrics.md`` is generated from here. Labels are closed sets: never a user, a chat or a token.
Callers say ``from holdfast import telemetry`` and ``telemetry.sends_waiting(3)``.
"""

from holdfast.telemetry.access import *
from holdfast.telemetry.api import *
from holdfast.telemetry.dependencies import *
from holdfast.telemetry.fanout import *
from holdfast.telemetry.gateway import *
from holdfast.telemetry.ingest import *
from holdfast.telemetry.limits import *
from holdfast.telemetry.logs import *
from holdfast.telemetry.marks import *
from holdfast.telemetry.metrics import *
from holdfast.telemetry.process import *
from holdfast.telemetry.store import *
from holdfast.telemetry.traces import *
from holdfast.telemetry.work import *
