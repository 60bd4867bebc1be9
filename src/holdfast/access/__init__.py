"""Who is asking, and what they may do.

Values and decisions only; nothing here knows HTTP. The tenant of a principal comes
from its credential and from nowhere else.

- ``principal``    a verified credential: a user, a tenant's backend or an operator
- ``roles``        the one table of what a role may do in a chat (pure)
- ``tokens``       user tokens (JWT): mint and verify
- ``secret_file``  the token keys of a file that several nodes share
- ``jws``          parses a compact token once (pure)
- ``jwks``         reads a set of public keys strictly (pure)
- ``issuers``      other token issuers: whose keys are trusted, kept fresh
- ``contract``     API keys as stored; ``CredentialStore``: load, save
- ``keys``         ``KeyRing``: issue, find, revoke; hashed at rest
- ``secrets``      credentials in files: of this node's own, or shared by several
- ``postgres``     credentials of a cluster: API keys in PostgreSQL
- ``tickets``      the right to read one reply, as a part of its address
- ``revocations``  who is cut off: the contract, its adapters, the entries in force
- ``proofs``       proofs that this server once sent a cursor (pure)
- ``network``      headers, origins and client addresses (pure)
- ``connection_limits``  how many connections may be open (pure)
- ``settings``     the settings of all this
"""
