"""The ``holdfast rules`` commands.

- ``commands``  the commands and what they print
- ``requests``  the requests they make to the server
- ``desired``   the rules a file asks for
"""

from holdfast.cli.rules.commands import rules

__all__ = ["rules"]
