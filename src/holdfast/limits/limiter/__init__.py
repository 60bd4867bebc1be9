"""The limiter: one node's checks, from the first source that can answer.

- ``settings``        how one node answers checks, and which node it is
- ``limiter``         the checks: rule, denial, lease, counters, local share
- ``remote_checks``   checks that need the counters, and those without an answer
- ``decisions``       compiled rules, and decisions made from readings (pure)
- ``cache``           denials, leases and holds, which save round trips (pure)
- ``batch``           one call per event-loop turn, with deadline and breaker
- ``fallback``        the local share while the counters are unavailable (pure)
- ``maintenance``     heartbeat, node count, reconciliation with the counters
- ``counter_health``  how well the shared counters answer
"""
