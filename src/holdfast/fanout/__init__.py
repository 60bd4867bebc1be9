"""Fanout: from the log to the connected sessions, best effort.

- ``feed``          reads the log, hands each batch to this node's gateway, moves on
- ``routing``       a batch as runs of chats; whether sequences are missing (pure)
- ``hot_chats``     which chats had many messages in the last minute (pure)
- ``members``       who is in a chat, for what is asked often
- ``job_reader``    makes jobs of the log, for webhooks and assistants
- ``log_expiry``    forgets old events of a shared log that every reader has read
- ``missed``        what a reader that lost the log reads from the store
- ``dead_letters``  events that cannot be used, kept for an operator
- ``registry``      which devices of which users are connected to which gateways
- ``bus``           notifications between nodes
- ``presence``      keeps the registry true, and learns from it who is online
- ``ephemeral``     typing, presence and receipts: at most once a second, never stored
- ``settings``      reading the log, retries, dead letters, ephemeral events
- ``receipts``      which senders learn that a message was delivered or read (pure)
"""
