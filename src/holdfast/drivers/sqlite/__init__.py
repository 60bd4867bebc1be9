"""SQLite for every part that keeps a file: one writer thread, a few readers, errors of ours. No part's tables are here.

``database``    opening, schema versions, transactions
``wal``         whether a write-ahead log is whole
``threads``     threads that own a connection each and take bounded work
``errors``      what SQLite's errors mean here
``copies``      one file of a backup: copied out of a live one, described, checked
``backup``      a folder with all files of a state directory and a manifest
``restore``     a backup put in place: all of it or nothing
``points``      named points of a commit or a restore at which a test may end the process
"""
