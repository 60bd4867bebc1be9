"""Rate limits: how much each subject may use, checked in microseconds, changed live,
and still bounded while Redis or the database is unavailable.

The rules:

- ``rules``          what a rule is, which one answers, how two views merge (pure)
- ``algorithms``     the four counting algorithms, which store what is *used* (pure)
- ``rule_json``      rules as JSON, and every reason to reject one (pure)
- ``rule_changes``   what one admin call does to one rule (pure)
- ``rule_import``    many rules set to what a file says, in one change (pure)
- ``entry_rules``    default rules of our entry points; no operator lockout (pure)

A check:

- ``counters/``      where use is counted: in this process or in Redis
- ``limiter/``       one check: rule, cached denial, lease, counters, local share
- ``entry_points``   the checks that Holdfast's own entry points make
- ``http``           decisions as HTTP headers and problem documents (pure)
- ``asgi``           middleware that limits any ASGI application

A change of the rules:

- ``rulestore/``     the durable rules and their change log: SQLite or PostgreSQL
- ``feed``           how a change reaches this node: by log, with notifications
- ``snapshot_file``  what a node keeps on disk to start without its dependencies
- ``admin``          what an operator can do

All together:

- ``composition``    settings, and running limits for a node or any other program
"""
