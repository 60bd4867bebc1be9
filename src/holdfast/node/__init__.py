"""Settings in, a running node out. The only part that chooses adapters.

``running`` starts and stops, from the storage outwards and from the sockets inwards:

    the port → state directory → store → event log → ingest → fanout → gateway → HTTP

``node`` puts the message path together, ``work`` the jobs and webhooks; ``roles`` keeps what runs beside the sockets
running; ``http`` is the port, ``posture`` the words for whoever starts it, ``backup`` copies of its state,
``revocations_file`` the list of who is cut off.
"""
