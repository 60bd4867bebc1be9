"""What a role may do in a chat: the one table. (Pure.)

===============================  =====  =====  ======
action                           owner  admin  member
===============================  =====  =====  ======
read, send, leave, redact own    yes    yes    yes
rename                           yes    yes    no
redact somebody else's message   yes    yes    no
add a member                     yes    yes    no
remove a member                  yes    yes    no
ban or mute a member, undo it    yes    yes    no
any of these with an admin       yes    no     no
change a role, remove an owner   yes    no     no
ban or mute an owner             no     no     no
===============================  =====  =====  ======

Nobody but an owner grants or removes a role that is not below their own. A direct chat
always has the same two members: the store refuses every change of it, except that each
may mute the other.
"""

from __future__ import annotations

from typing import Literal

from holdfast.message import Role

Action = Literal[
    "read", "send", "leave", "redact_own", "rename", "redact_any", "add_member",
    "remove_member", "restrict_member", "change_role",
]  # fmt: skip

_EVERYBODY: frozenset[Role] = frozenset({"owner", "admin", "member"})
_STAFF: frozenset[Role] = frozenset({"owner", "admin"})
_OWNERS: frozenset[Role] = frozenset({"owner"})

_TABLE: dict[Action, frozenset[Role]] = {
    "read": _EVERYBODY,
    "send": _EVERYBODY,
    "leave": _EVERYBODY,
    "redact_own": _EVERYBODY,
    "rename": _STAFF,
    "redact_any": _STAFF,
    "add_member": _STAFF,
    "remove_member": _STAFF,
    "restrict_member": _STAFF,
    "change_role": _OWNERS,
}


def may(role: Role, action: Action, target: Role = "member") -> bool:
    """Whether ``role`` may do ``action``.

    ``target``: the role the other gets or has.
    """
    if role not in _TABLE[action]:
        return False
    if action == "restrict_member" and target == "owner":
        return False
    if action in ("add_member", "remove_member", "restrict_member") and target != "member":
        return role == "owner"
    return True
