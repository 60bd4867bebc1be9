"""Signed webhooks: a reader of the event log makes one job per message and endpoint,
and a handler delivers it.

- ``contract``       endpoints and the log of deliveries
- ``reader``         from the event log to jobs, with its position in the same commit
- ``delivery``       the handler of a delivery job
- ``signature``      what is signed, and how (Standard Webhooks; pure)
- ``address_guard``  which URLs and addresses may be called (pure)
- ``http_client``    HTTP calls to endpoints; imported with the first call
- ``parking``        the jobs of a disabled endpoint, and when they expire
- ``parts``          the settings, and the parts that a node holds
- ``alert_sinks``    delivers notices of alerts: to a webhook, a command, the log
- ``silences``       silences of alerts that hold on every node of a cluster
- ``sqlite``         endpoints and their deliveries in a SQLite file
- ``postgres``       endpoints and their deliveries of a cluster
"""
