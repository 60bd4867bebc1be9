"""Who is asking, and what they may do: principals, tokens and keys, the role table, the door.

Values and decisions only; nothing here knows HTTP. The tenant of a principal comes from its credential and
from nowhere else.

- ``principal``  who is asking: a user, a tenant's backend, an operator; and their scopes
- ``roles``      the one table that says what a role may do in a chat
- ``tokens``     user tokens (JWT): mint and verify
- ``jwks``       a set of public keys, read strictly
- ``issuers``    sign-ins of your own: whose keys are trusted, for which tenants, kept fresh
- ``compact``    a token as it is written, read once
- ``keys``       API keys: issue, find, revoke; hashed at rest
- ``revocations``  who is cut off: the contract, its adapters, and what a node holds
- ``secrets``    what a state directory keeps for itself
- ``door``       origins, client addresses, handshake and connection limits
"""
