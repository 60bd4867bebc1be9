"""AI replies over SSE: they wait their turn, never end silently and can be resumed.

A *reply* is one AI answer: numbered entries and exactly one end.

- ``reply``            the values: entries, ids, owners, failures (pure)
- ``settings``         what an operator sets
- ``parts``            the replies of a node: start, find, cancel, stop
- ``admission``        what a request must pass before it runs or waits
- ``producer``         from a place in the pool to the reply's one end
- ``live_reply``       a reply in the memory of the node that makes it
- ``attached``         a reply that its owner may read, here or in the log
- ``reader``           cursors over entries, in memory or in the log
- ``fair_queue``       the pool and its queue as a state machine (pure)
- ``fair_rings``       who is active, who waits, whose turn it is (pure)
- ``pool``             active generations and the queue for them, across nodes
- ``entry_codec``      entries as a log stores them, and back (pure)
- ``reply_log``        replies that outlive their connection or their node
- ``providers``        where tokens come from
- ``provider_stream``  reads a provider's SSE (pure)
- ``summary``          a reply as operators see it (pure)
- ``usage``            token rules, and what every reply used
- ``usage_store``      token counts by day, tenant, user, model and provider
- ``body_bytes``       the bytes of request bodies that a node holds
- ``assistants``       users whose messages a model writes
- ``sse``              server-sent events as bytes (pure)
- ``dialects``         what the clients of each surface read (pure)
"""
