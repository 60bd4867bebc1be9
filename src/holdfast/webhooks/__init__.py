"""Signed side effects: a named reader of the event log that makes one job per (endpoint, chat, sequence).

``contract``  endpoints and the log of deliveries; ``sqlite`` keeps them
``signing``   Standard Webhooks: what is signed and how                          (pure)
``guard``     which addresses may be called at all
``calling``   HTTP to endpoints; imported when the first is called
``delivery``  the handler of a delivery job
``parking``   what waits while an endpoint is disabled, and for how long
``plane``     the parts as a node holds them, and how they are set
``reader``    from the event log to jobs, its position in the same transaction
"""
