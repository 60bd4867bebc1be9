"""Active generations and the queue for them, across nodes.

- ``contract``  what a pool answers, in batches
"""
