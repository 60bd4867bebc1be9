"""REST and operators' endpoints over the parts of the path: a plain ASGI application.

- ``routes``    the table of every endpoint; start here
- ``receive``   from a request to a call: who, may they, what
- ``chats``, ``messages``, ``admin``, ``probes``   what the endpoints do
- ``problems``  what is wrong with a body, in words
- ``answers``   statuses and the one error body
- ``openapi``, ``reference``   the table as OpenAPI, as /docs and as docs/reference/rest.md
- ``envelope``  request ids, security headers, access log
- ``app``       all of it, mounted: ``make_app(deps)``
"""
