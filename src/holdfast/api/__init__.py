"""REST and operators' endpoints over the parts of the path: a plain ASGI application.

- ``routes``    the table of every endpoint; start here
- ``request``   a request and its response, as ASGI has them
- ``routing``   which endpoint a path names
- ``strangers`` requests without a good credential, counted by address
- ``receive``   from a request to a call: who, may they, what
- ``chats``, ``messages``, ``limits``, ``work``, ``admin``, ``probes``   what the endpoints do
- ``keyed``     one answer for one Idempotency-Key
- ``problems``  what is wrong with a body, in words
- ``answers``   statuses and the one error body
- ``openapi``, ``reference``   the table as OpenAPI, as /docs and as docs/reference/rest.md
- ``pages``     what is the same for everybody: made once, compressed once, cached
- ``cors``      pages of other origins
- ``envelope``  request ids, security headers, access log
- ``deps``      what all of it stands on, given by the node
- ``app``       all of it, mounted: ``make_app(deps)``
"""
