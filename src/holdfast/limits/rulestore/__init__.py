"""The durable rules, their change log, and notifications of changes.

- ``contract``       what a rule store and its notifications promise
- ``serialization``  rules and changes as databases and notifications carry them
- ``notifications``  notifications within this process
- ``redis``          notifications over a Redis channel
- ``sqlite/``        the embedded store
- ``postgres/``      a shared store: a primary, and replicas to read from
"""
