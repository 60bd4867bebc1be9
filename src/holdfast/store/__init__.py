"""The store: durable chats, and the rules every adapter applies alike.

- ``contract``       what a store promises
- ``commands``       the commands that change a chat, as values (pure)
- ``plan``           what a decision reads and what an adapter must write (pure)
- ``command_rules``  from a command to its plan, or a refusal (pure)
- ``command_checks`` the checks that several commands share (pure)
- ``numbering``      which sequence or error each send of a group gets (pure)
- ``pages``          how a page of messages is cut (pure)
- ``audit_chain``    the hash chains of the audit log (pure)
- ``rollbacks``      cursors beyond the head: lost messages, or a made-up cursor
- ``leases/``        one node at a time does what only one may do
- ``nodes/``         which nodes of a cluster live, and what each of them is
- ``memory/``        the reference adapter, also the store of the simulation
- ``sqlite/``        the embedded adapter: one file, one writer thread, a few readers
- ``postgres/``      the adapter for many nodes
"""
