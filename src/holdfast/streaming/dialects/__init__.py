"""The surfaces as pure functions from entries to what their clients read.

- ``contract``  what a dialect is
"""
