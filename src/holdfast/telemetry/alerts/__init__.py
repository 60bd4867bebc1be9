"""The alerts: every one of them, once, as values. (Pure.)

From this list come the rules for Prometheus (``deploy/prometheus/rules.yml``), their
tests, the page docs/reference/alerts.md, and what a node evaluates over its own metrics
(``telemetry.judge``). Names and severities are what other programs route by: they stay.

A SEV calls somebody: SEV-1 at once, SEV-2 now, SEV-3 in working hours. A warning is
yellow and calls nobody. ``rows``: where a design document asks for it, by number.

- ``correctness``  what is stored: numbering, halted chats, lost messages
- ``sends``        sends on their way into the store
- ``delivery``     messages on their way to clients: log, fanout, connections
- ``node``         the node itself: its disk, its defects, the alerts
- ``limits``       rules, counters, keys of token issuers
- ``work``         jobs and webhooks
- ``replies``      AI replies
"""

from holdfast.telemetry.alert import FIVE_MINUTES, Alert, Severity, equals, expected_series
from holdfast.telemetry.alerts.correctness import CORRECTNESS
from holdfast.telemetry.alerts.delivery import DELIVERY
from holdfast.telemetry.alerts.limits import LIMITS
from holdfast.telemetry.alerts.node import NODE
from holdfast.telemetry.alerts.replies import REPLIES
from holdfast.telemetry.alerts.sends import SENDS
from holdfast.telemetry.alerts.work import WORK
from holdfast.telemetry.expressions import Absent

_JUDGED = (*CORRECTNESS, *SENDS, *DELIVERY, *NODE, *LIMITS, *WORK, *REPLIES)

ALERTS: tuple[Alert, ...] = (
    *_JUDGED,
    Alert(
        "HoldfastMetricAbsent",
        Severity.SEV3,
        equals(Absent(expected_series(_JUDGED)), 1, FIVE_MINUTES),
        "A metric that alerts are made of is not there, so they cannot fire.",
        "runbooks/defect.md",
    ),
)
