"""Replies that outlive their connection or their node.

- ``contract``  what a log of replies promises
- ``memory``    the log in memory
- ``writer``    the node's side: writes what its replies have grown by
"""
