"""Where tokens come from.

- ``contract``  what a provider promises
- ``routing``   which provider answers, and what comes after a failure
"""
