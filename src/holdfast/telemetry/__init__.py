"""Every metric, log line and span; nothing else in Holdfast names a metric.

A part calls one function per event: ``from holdfast import telemetry`` and
``telemetry.sends_waiting(3)``. Labels are closed sets: never a user, a chat or a token.
docs/reference/metrics.md is generated from the metrics here; names in brackets in a
HELP text are those of the design documents.

- ``metrics``    the registry; dependencies, process, REST, access, limits, work
- ``messaging``  the message path: gateway, ingest, history, store, fanout
- ``logs``       where log lines go, and what is removed from them
- ``traces``     spans for OpenTelemetry, when configured
- ``marks``      marks of rare moments, which tests collect
"""

from holdfast.telemetry.logs import *
from holdfast.telemetry.marks import *
from holdfast.telemetry.messaging import *
from holdfast.telemetry.metrics import *
from holdfast.telemetry.traces import *
