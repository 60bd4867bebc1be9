"""REST for users, tenants and operators: a plain ASGI application over the parts.

- ``routes``       the table of every endpoint; start here
- ``endpoint``     a row of the table, a call of it, and its answer
- ``app``          ``make_app(deps)``: the table as an ASGI application
- ``routing``      finds the endpoint of a path (pure)
- ``request``      from an ASGI request to a checked call
- ``strangers``    limits by address for requests without a good credential (pure)
- ``idempotency``  one answer for one Idempotency-Key
- ``responses``    statuses and the one error body
- ``middleware``   request ids, security headers, metrics, the access log
- ``cors``         which pages of other origins may call
- ``chats``        endpoints: chats, members, presence, tokens
- ``messages``     endpoints: messages and their delivery status
- ``limits``       endpoints: rules for operators, checks for other services
- ``jobs``         endpoints: jobs, streams, dead letters
- ``webhooks``     endpoints: webhook endpoints and their deliveries
- ``revocations``  endpoints: revocations, bans and mutes of a tenant, disconnects
- ``admin``        endpoints: halt and recover, erasure, audit log, backups, API keys
- ``probes``       endpoints: liveness, readiness, status, metrics
- ``schemas``      bodies, queries and answers (pure)
- ``problems``     explains what is wrong with a body or a query (pure)
- ``openapi``      the table as OpenAPI (pure)
- ``reference``    the table as ``/docs`` and docs/reference/rest.md (pure)
- ``pages``        static pages: built once, compressed once, cached
- ``deps``         ``ApiDeps``: what the node gives the API, and ``ApiSettings``
"""
