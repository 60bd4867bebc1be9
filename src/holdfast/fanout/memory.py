"""Who is online, for one process: the gateways here are all there are. Nothing expires, for nothing can vanish.

The way to the gateways of this process: a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from holdfast import telemetry
from holdfast.errors import Unavailable
from holdfast.fanout.contract import Envelope
from holdfast.message import User

ANSWERS_MAX = 1_024
"""Answers kept until anybody comes or goes: a chat's members are the same set from message to message."""


class MemoryRegistry:
    """See ``holdfast.fanout.contract.Registry``. A gateway is known from its first announcement on."""

    def __init__(self) -> None:
        self._users: dict[str, set[User]] = {}
        self._answers: dict[frozenset[User], Mapping[str, Set[User]]] = {}

    async def announce(self, gateway: str, users: Iterable[User]) -> None:
        self._users.setdefault(gateway, set()).update(users)
        self._answers.clear()
        telemetry.healthy_gateways(len(self._users))

    async def withdraw(self, gateway: str, users: Iterable[User]) -> None:
        self._users.get(gateway, set()).difference_update(users)
        self._answers.clear()

    async def gateways_of(self, users: Iterable[User]) -> Mapping[str, Set[User]]:
        asked = users if isinstance(users, frozenset) else frozenset(users)
        if (known := self._answers.get(asked)) is not None:
            return known
        found = {gateway: asked & held for gateway, held in self._users.items()}
        answer = {gateway: held for gateway, held in found.items() if held}
        if len(self._answers) >= ANSWERS_MAX:
            self._answers.clear()
        self._answers[asked] = answer
        return answer


class LocalLink:
    """See ``holdfast.fanout.contract.Link``. The envelope is in the sessions' lanes when ``deliver`` returns."""

    def __init__(self) -> None:
        self._gateways: dict[str, Callable[[Envelope], None]] = {}

    def connect(self, gateway: str, deliver: Callable[[Envelope], None]) -> None:
        """``deliver`` takes the envelopes of this gateway from now on."""
        self._gateways[gateway] = deliver

    def disconnect(self, gateway: str) -> None:
        """The gateway takes no more."""
        self._gateways.pop(gateway, None)

    async def deliver(self, gateway: str, envelope: Envelope) -> None:
        deliver = self._gateways.get(gateway)
        if deliver is None:
            raise Unavailable(f"there is no gateway {gateway} here")
        try:
            deliver(envelope)
        except Exception as error:
            telemetry.defect("gateway", error)
            raise Unavailable(f"gateway {gateway} failed at the envelope") from error
