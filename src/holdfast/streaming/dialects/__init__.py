"""The surfaces as pure functions from entries to what their clients read.

- ``contract``           what a dialect is
- ``request_body``       a request's fields, decoded only where they are read
- ``openai_errors``      errors as clients of OpenAI's API read them
- ``chat``               chat completions
- ``responses_request``  a request of the responses API as a chat completion
- ``responses``          responses as events and as an object
- ``native``             native replies, made for EventSource
"""
