"""Counters: what each subject has used of each rule.

- ``contract``  what counters promise, and the values of a call
- ``table``     counters in a dict, at a time the caller passes in (pure)
- ``memory``    a table and a clock: the counters of one process
- ``redis``     counters shared by the nodes of a region, decided by the script in
                ``lua/``
- ``lua/``      the algorithms of ``limits.algorithms`` as Redis runs them
"""
