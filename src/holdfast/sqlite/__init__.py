"""SQLite for every part that keeps a file: one writer thread, a few readers, errors of ours. No part's tables are here.

``database``    opening, schema versions, transactions
``threads``     threads that own a connection each and take bounded work
``statements``  named statements and migrations out of .sql files
``errors``      what SQLite's errors mean here
``points``      named points of a commit at which a test may end the process
"""
