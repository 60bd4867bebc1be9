"""The registry and the link of a single process.

The gateways of this process are the only ones, so no entry has to expire, and a
delivery is a function call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from holdfast import telemetry
from holdfast.errors import Unavailable
from holdfast.fanout.contract import Envelope
from holdfast.message import User

ANSWERS_MAX = 1_024
"""Cached answers, dropped when any user connects or disconnects: a chat's members are
the same set from message to message.
"""


class MemoryRegistry:
    """See ``fanout.contract.Registry``. The first announcement creates a gateway."""

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
    """See ``holdfast.fanout.contract.Link``. When ``deliver`` returns, the envelope is
    in the sessions' lanes.
    """

    def __init__(self) -> None:
        self._gateways: dict[str, Callable[[Envelope], None]] = {}

    def connect(self, gateway: str, deliver: Callable[[Envelope], None]) -> None:
        """Pass this gateway's envelopes to ``deliver`` from now on."""
        self._gateways[gateway] = deliver

    def disconnect(self, gateway: str) -> None:
        """Stop passing envelopes to this gateway."""
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
