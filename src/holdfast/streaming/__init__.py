"""AI replies over SSE: they wait their turn, never end silently and can be resumed.

A *reply* is one AI answer: numbered entries and exactly one end.

- ``reply``       the values: entries, ids, owners, failures (pure)
- ``entry_codec`` entries as a log stores them, and back (pure)
- ``settings``    what an operator sets
- ``fair_queue``  the pool and its queue as a state machine (pure)
- ``fair_rings``  who is active, who waits, whose turn it is (pure)
- ``pool``        active generations and the queue for them, across nodes
- ``reply_log``   replies that outlive their connection or their node
- ``usage``       token rules, and what every reply used
- ``usage_store`` token counts by day, tenant, user, model and provider
- ``providers``   where tokens come from
- ``provider_stream`` reads a provider's SSE (pure)
- ``sse``         server-sent events as bytes (pure)
- ``dialects``    what the clients of each surface read (pure)
"""
