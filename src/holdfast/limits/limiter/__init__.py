"""The limiter: one node's checks, from the first source that can answer.

- ``settings``        how one node answers checks, and which node it is
- ``limiter``         the checks: rule, denial, lease, counters, local share
- ``decisions``       rules prepared for checks, and the decisions made from readings
                      (pure)
- ``cache``           remembered denials, leases and holds, which save round trips
                      (pure)
- ``batch``           the checks of one event-loop turn in one call, with deadline and
                      breaker
- ``fallback``        this node's local share while the counters are unavailable (pure)
- ``maintenance``     heartbeat, node count, and reconciliation with the counters
- ``counter_health``  how well the shared counters answer
"""
