"""What only tests need to prove the promises; ``holdfast.verify`` has the rest.

- ``simulation``       a whole server and its clients on virtual time, from one seed
- ``controls``         deliberately broken variants that the checkers must notice
- ``virtual_loop``     the event loop with virtual time
- ``faults``           wrappers that make a dependency fail
- ``proxy``            a TCP proxy that makes a network fail
- ``powercut``         a disk that loses unsynced writes
- ``end_state``        records the stored chats and the log at the end of a run
- ``invariants``       the eighteen invariants of the design documents
- ``limits_checkers``  checkers 13 and 14
- ``coverage_marks``   the rare events that each proof must reach
- ``planned``          the planned faults, and which of them no run covers
- ``results``          the counts of a run, as RESULTS.md
"""
