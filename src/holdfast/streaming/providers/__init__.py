"""Where tokens come from.

- ``contract``  what a provider promises
- ``script``    what the scripted provider answers (pure)
- ``scripted``  makes up its answers, at a settable pace and with settable faults
- ``openai_compatible``  asks a server that speaks OpenAI's chat completions
- ``routing``   which provider answers, and what comes after a failure
"""
