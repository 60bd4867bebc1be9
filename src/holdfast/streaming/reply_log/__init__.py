"""Replies that outlive their connection or their node.

- ``contract``  what a log of replies promises
"""
