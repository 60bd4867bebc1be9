"""Step 4: admits, groups, makes durable, answers.

``contract`` is the door; behind it ``waiting`` (pure: what waits, within which bounds, in which groups), ``intake``
(the loop around it) and ``durability`` (the store behind a breaker and a deadline). Beside them ``watermarks`` (how far
devices are), ``repair`` (what the server does to a chat by itself) and ``hot`` (pure: which chats are busy).
"""
