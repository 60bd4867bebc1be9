"""Limits: who may do how much, decided in microseconds, changed live, bounded when everything else is away.

- ``rules``       what a rule is, which rule answers, and how two views of the rules merge       (pure)
- ``algorithms``  the four ways to count, as oracles that store what is *used*                   (pure)
- ``form``        rules as JSON: the seed's names, and every reason to refuse one                (pure)
- ``changes``     what one admin call does to one rule                                           (pure)
- ``rule_import`` many rules made as a file says, in one change                                  (pure)
- ``counters/``   where the counting happens: memory, or Redis with the same algorithms in Lua
- ``limiter``     one check: snapshot, denial cache, lease, batch, breaker, local share
- ``answers``     how decisions look in HTTP, at every door                                      (pure)
- ``rulestore/``  the durable rules and their change log: SQLite, or PostgreSQL with a replica
- ``feed``        how a change reaches this node: the log by a cursor, doorbells as hints
- ``control``     what an operator can do
- ``opening``     all of it running, for a node and for any other program
- ``entrances``   the one question Holdfast's own doors ask, and the rules they start with
"""
