"""SQLite for every part that keeps a file. No part's tables are here.

- ``database``   opening, schema versions, transactions and their commit
- ``threads``    threads that own a connection each and take bounded work
- ``errors``     what SQLite's errors mean here
- ``wal``        detects a damaged write-ahead log
- ``file_copy``  one file of a backup: copied from a live database and checked
- ``backup``     a folder with all files of a state directory and a manifest
- ``restore``    puts a backup in place: all of it or nothing
"""
