"""Assistants: users whose messages a model writes, where they are members.

A message that triggers an assistant becomes a job, the job a reply, the reply one
stored message. The chat's members see the reply grow.

- ``triggers``  which messages an assistant replies to (pure)
- ``prompt``    what the model is asked: instructions, the chat's last messages (pure)
- ``content``   the text of a reply, as far as it has come (pure)
- ``jobs``      the job of a reply, and what becomes of it after a failure
- ``reader``    makes a job of each message that triggers an assistant
- ``scene``     the chat of a reply, and whether the reply is still wanted
- ``sending``   sends the message, until it is stored
- ``replying``  runs the job: asks the model, shows the text, sends the message
"""
