"""The promises as checkers and drills, used by the tests, by CI and by ``holdfast verify``.

``history``     what clients did and saw, and what was stored in the end: one JSON-lines format
``checkers``    one pure function per promise: a history in, a verdict out
``invariants``  the seeds' eighteen invariants under their own names
``witness``     a client machine that notes down what it does and sees; ``recorded``: the whole client with one
``snapshot``    what is stored and logged in the end, read through the contracts
``trial``       a bounded workload against a running server: ``holdfast verify URL``
``faults``      wrappers that make a dependency fail, hang or lie at our own edge of it
``proxy``       a TCP proxy that makes a network fail
``powercut``    a disk that forgets what was not synced
``virtual``     an event loop whose time moves only when nothing is left to do
``simulation``  a whole server and its clients on that loop, from one seed
``controls``    deliberately broken variants: each must turn its own checkers red, and no other
``moments``     the rare moments that a proof must have met
``results``     the counts of a run, as RESULTS.md; ``planned``: the faults it is meant to survive
"""
