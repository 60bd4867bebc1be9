"""The metrics and named events we emit, one function each, one file per part; nothing else in Holdfast names a metric.

Names are the seeds' dotted names made Prometheus-like; HELP texts carry the dotted name in brackets, and
``docs/reference/metrics.md`` is generated from here. Labels are closed sets: never a user, a chat or a token.
Callers say ``from holdfast import telemetry`` and ``telemetry.sends_waiting(3)``.
"""

from holdfast.telemetry.logs import *
from holdfast.telemetry.marks import *
from holdfast.telemetry.messaging import *
from holdfast.telemetry.metrics import *
from holdfast.telemetry.traces import *
