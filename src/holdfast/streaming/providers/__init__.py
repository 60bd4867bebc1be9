"""Where tokens come from.

- ``contract``           what a provider promises
- ``script``             what the scripted provider answers (pure)
- ``scripted``           makes up its answers, with settable pace and faults
- ``openai_compatible``  asks a server that speaks OpenAI's chat completions
- ``source``             whether a provider may be asked now: breaker and pause
- ``routing``            which provider answers, and what comes after a failure
"""
