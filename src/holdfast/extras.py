"""Engines whose libraries only their users install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import BadSetting


@contextmanager
def extra(name: str) -> Iterator[None]:
    """BadSetting, with what to install, if an engine is asked for whose library is not there."""
    try:
        yield
    except ImportError as error:
        raise BadSetting(
            f"{error.name} is not installed: in a checkout of Holdfast run `pip install '.[{name}]'`, "
            f"or for the locked version `pip install --require-hashes --no-deps -r requirements/{name}.lock`"
        ) from None
