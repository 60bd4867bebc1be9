"""The ``holdfast rules`` commands.

- ``commands``  the commands and what they print
- ``requests``  the requests they make to the server
- ``desired``   the rules a user asks for, by command line or file
"""

from holdfast.cli.rules.commands import rules

__all__ = ["rules"]
