"""Rate limits: how much each subject may use, checked in microseconds, changed live,
and still bounded while Redis or the database is unavailable.

The rules:
- ``rules``          what a rule is, which rule answers a check, how two views merge
                     (pure)
- ``algorithms``     the four counting algorithms, which store what is *used* (pure)
- ``rule_json``      rules as JSON, and every reason to reject one (pure)
- ``rule_changes``   what one admin call does to one rule (pure)
- ``rule_import``    many rules set to what a file says, in one change (pure)
- ``entry_rules``    default rules of our own entry points; no lockout of operators
                     (pure)

A check:
- ``counters/``      where use is counted: this process, or Redis with the same
                     algorithms
- ``limiter/``       one check: rule, cached denial, lease, counters, local share
- ``entry_points``   the checks that Holdfast's own entry points make
- ``http``           decisions as HTTP headers and problem documents (pure)
- ``asgi``           middleware that limits any ASGI application

A change of the rules:
- ``rulestore/``     the durable rules and their change log: SQLite or PostgreSQL
- ``feed``           how a change reaches this node: the log by cursor, notifications as
                     hints
- ``snapshot_file``  what a node keeps on disk in order to start without its
                     dependencies
- ``admin``          what an operator can do

All together:
- ``composition``    settings, and running limits for a node or for any other program
"""
