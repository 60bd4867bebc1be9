"""REST for users, tenants and operators: a plain ASGI application over the parts.

- ``routes``          the table of every endpoint and page; start here
- ``operator_routes`` its rows for operators: chats, rules, jobs, webhooks
- ``endpoint``        a row of the table, a call of it, and its answer
- ``app``             ``RestApp``: the table as an ASGI application
- ``request``         from an ASGI request to a checked call
- ``address_limits``  limits by address for requests without a good credential (pure)
- ``idempotency``     one answer for one Idempotency-Key
- ``responses``       statuses, the one error body, cached pages
- ``streaming``       streamed answers: deadline, drain, clients that disconnect
- ``middleware``      request ids, security headers, metrics, the access log
- ``cors``            which pages of other origins may call
- ``chats``           endpoints: chats, members, presence, tokens
- ``messages``        endpoints: messages and their delivery status
- ``limits``          endpoints: rules for operators, checks for other services
- ``jobs``            endpoints: jobs, streams, dead letters
- ``webhooks``        endpoints: webhook endpoints and their deliveries
- ``revocations``     endpoints: revocations, bans and mutes of a tenant, disconnects
- ``admin``           endpoints: halt and recover, erasure, audit log, backups, API keys
- ``probes``          endpoints: liveness, readiness, status, metrics
- ``schemas``         bodies, queries and answers (pure)
- ``limit_schemas``   bodies, queries and answers of limits (pure)
- ``problems``        explains what is wrong with a body or a query (pure)
- ``openapi``         the table as OpenAPI (pure)
- ``reference``       the table as ``/docs`` and docs/reference/rest.md (pure)
- ``deps``            ``ApiDeps``: what the node gives the API, and ``ApiSettings``
"""
