"""History: reads of chats for sessions and REST, bounded and with deadlines.

- ``history``      pages, resumes and any other read of the store, behind a breaker
- ``memberships``  the chats of many users, gathered into few reads
- ``semaphore``    a bound on concurrent reads that serves tenants in turn
"""
