"""Fanout: from the log to the connected sessions, best effort.

- ``contract``      the link to gateways, and what it carries
- ``fanout``        reads the log, routes each batch, hands it over, moves on
- ``routing``       what goes to which gateway; whether sequences are missing (pure)
- ``members``       who is in a chat, as far as the log has been read
- ``job_reader``    makes jobs of the log, for webhooks and assistants
- ``dead_letters``  events that cannot be used, kept for an operator
- ``memory``        the link of a single process
- ``registry``      which devices of which users are connected to which gateways
- ``bus``           notifications between nodes
- ``presence``      keeps the registry true, and learns from it who is online
- ``ephemeral``     typing, presence and receipts: at most once a second, never stored
- ``receipts``      which senders learn that a message was delivered or read (pure)
"""
