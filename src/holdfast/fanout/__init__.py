"""Step 7: from the log to the sessions here and elsewhere, best effort.

``contract`` has the seams (``registry/``: who is connected where; ``link/``: the way to a gateway). ``fanout`` is the
role: it asks ``members`` who is in a chat, ``routing`` (pure) what goes where, and puts aside in ``dead_letters`` what
makes no sense. ``ephemeral`` tells typing, presence and ``receipts`` (pure); ``attendance`` keeps the registry in step
with who is connected here; ``gaps`` (pure) watches that the log is dense.
"""
