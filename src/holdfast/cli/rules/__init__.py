"""The commands about rate limits; what they ask the server is in ``calls``, what rules shall be in ``wanted``."""

from holdfast.cli.rules.commands import rules

__all__ = ["rules"]
