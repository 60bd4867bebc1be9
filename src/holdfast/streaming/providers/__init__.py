"""Where tokens come from.

- ``contract``  what a provider promises
"""
