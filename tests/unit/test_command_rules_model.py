"""The life of a chat as decided command by command: whoever asks for what, the rules of
a chat hold after it.

Every plan is applied to a model of the chat; what the model allows was decided here
from the documented rules.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.errors import ChatHalted, Forbidden, InvalidMessage, NotAMember, NotFound
from holdfast.message import Chat, Member, Mute, Role, User
from holdfast.store.command_rules import decide
from holdfast.store.commands import (
    AddMember,
    ChangeBan,
    ChangeMute,
    ChangeRole,
    Command,
    CommandContext,
    CreateChat,
    HaltChat,
    RaiseEpoch,
    RecoverChat,
    RemoveMember,
    RenameChat,
)
from holdfast.store.plan import ChangePlan, ChatSettings, CommandInputs, joining, target_of

LIMITS = ChatSettings(
    members_max=4, members_at_creation_max=2, chats_per_user_max=2, bans_max=2, mutes_max=2
)
USERS = st.sampled_from(["ann", "bob", "cyd", "dan", "eve"])
ROLES = st.sampled_from(["owner", "admin", "member"])
BY = st.tuples(USERS, st.booleans())
"""Who asks, and whether as an operator."""


class ChatLife(RuleBasedStateMachine):
    """One group chat, five users who are in no other."""

    @initialize()
    def create(self) -> None:
        self.members: dict[str, Role] = {}
        self.mutes: dict[str, Mute] = {}
        self.banned: set[str] = set()
        self.chat: Chat | None = None
        self.counter: int | None = None
        self.highest = 0
        self.acts = 0
        self.ask(CreateChat(self.act("ann", False), "c", "group", "Team", ["bob"]))

    def act(self, user: str, operator: bool) -> CommandContext:
        self.acts += 1
        return CommandContext(User("t", user), "now", f"m{self.acts}", operator=operator)

    def ask(self, command: Command) -> ChangePlan | type[Exception]:
        """Decide as every store does, and apply the plan to the model."""
        actor, target = command.act.actor.user_id, target_of(command)
        seen = CommandInputs(
            self.chat,
            actor=self.member(actor),
            target=self.member(target) if target else None,
            members=len(self.members),
            owners=sum(role == "owner" for role in self.members.values()),
            banned=target in self.banned,
            bans=len(self.banned),
            mute=self.mutes.get(target or ""),
            mutes=len(self.mutes),
            chats={user: int(user in self.members) for user in joining(command)},
            counter=self.counter,
            highest=self.highest,
        )
        try:
            plan = decide(command, seen, LIMITS)
        except (ChatHalted, Forbidden, InvalidMessage, NotAMember, NotFound) as refusal:
            return type(refusal)
        self.chat = plan.chat
        self.members |= {member.user_id: member.role for member in plan.put}
        for user in plan.drop:
            del self.members[user]
        if plan.mute is not None:
            self.mutes[plan.mute.user_id] = plan.mute
        self.mutes.pop(plan.unmute or "", None)
        if plan.ban is not None:
            self.banned.add(plan.ban.user_id)
        self.banned.discard(plan.unban or "")
        if plan.counter is not None:
            self.counter = plan.counter
        if plan.event is not None:
            assert self.counter is not None
            self.counter = self.highest = self.counter + 1
        return plan

    def member(self, user: str) -> Member | None:
        return (
            Member(user, self.members[user], "now", user in self.mutes)
            if user in self.members
            else None
        )

    def operators_mute(self, by: tuple[str, bool], user: str) -> bool:
        """Whether the user's mute is an operator's, and somebody else is asking."""
        return user in self.mutes and self.mutes[user].by_operator and not by[1]

    def outside(self, by: tuple[str, bool]) -> bool:
        return by[0] not in self.members and not by[1]

    def outranks(self, by: tuple[str, bool], role: Role) -> bool:
        """Operators, owners, and admins over members."""
        mine = self.members.get(by[0])
        return by[1] or mine == "owner" or (mine == "admin" and role == "member")

    @rule(by=BY, user=USERS, role=ROLES)
    def add(self, by: tuple[str, bool], user: str, role: Role) -> None:
        before, halted, muted = dict(self.members), self.halted, user in self.mutes
        kept = role == "owner" and self.operators_mute(by, user)
        said = self.ask(AddMember(self.act(*by), "c", user, role))
        assert (user in self.mutes) is (
            muted and not (isinstance(said, ChangePlan) and role == "owner")
        )
        if isinstance(said, ChangePlan):
            assert by[1] or before[by[0]] in ("owner", "admin")
            if user in before:
                assert before[user] == role and said.event is None and self.members == before
            else:
                assert (
                    not halted
                    and len(before) < LIMITS.members_max
                    and self.members == {**before, user: role}
                )
                assert said.event is not None and (said.record is not None) is by[1]
                assert said.event.muted is (user in self.mutes)
        else:
            assert self.members == before
            room = (
                len(before) < LIMITS.members_max
                and user not in before
                and (before or role == "owner")
            )
            room = room and user not in self.banned and not kept
            assert not (room and not halted and before.get(by[0]) == "owner"), (
                f"an owner was refused: {said}"
            )
            if before.get(by[0]) == "member" and not by[1]:
                assert said is Forbidden

    @rule(by=BY, user=USERS)
    def remove(self, by: tuple[str, bool], user: str) -> None:
        before, halted = dict(self.members), self.halted
        allowed = user == by[0] or (user in before and self.outranks(by, before[user]))
        last_owner = (
            before.get(user) == "owner"
            and [*before.values()].count("owner") == 1
            and len(before) > 1
        )
        said = self.ask(RemoveMember(self.act(*by), "c", user))
        if isinstance(said, ChangePlan):
            assert allowed and not last_owner and not halted
            assert self.members == {name: role for name, role in before.items() if name != user}
        else:
            assert self.members == before
            assert self.outside(by) or user not in before or not allowed or last_owner or halted, (
                said
            )

    @rule(by=BY, user=USERS, role=ROLES)
    def change_role(self, by: tuple[str, bool], user: str, role: Role) -> None:
        before, halted = dict(self.members), self.halted
        kept = role == "owner" and self.operators_mute(by, user)
        said = self.ask(ChangeRole(self.act(*by), "c", user, role))
        if isinstance(said, ChangePlan):
            assert by[1] or before[by[0]] == "owner"
            assert self.members == {**before, user: role}
            assert (said.event is None) is (before[user] == role)
        else:
            assert self.members == before
            owners = [*before.values()].count("owner")
            losing = before.get(user) == "owner" and owners == 1
            assert (
                halted
                or losing
                or kept
                or user not in before
                or not (by[1] or before.get(by[0]) == "owner")
            ), said

    @rule(by=BY, name=st.sampled_from(["Team", "Crew", "", "x" * 201, "a\nb"]))
    def rename(self, by: tuple[str, bool], name: str) -> None:
        before, halted = self.chat, self.halted
        said = self.ask(RenameChat(self.act(*by), "c", name))
        assert (
            self.chat is not None
            and self.chat.name.isprintable()
            and 1 <= len(self.chat.name) <= 200
        )
        if isinstance(said, ChangePlan):
            assert self.outranks(by, "member") and self.chat.name == name
            assert by[1] or by[0] not in self.mutes, "a name is heard by everybody"
            assert before is not None and (said.event is None) is (before.name == name)
            assert said.event is None or not halted
        else:
            assert self.chat == before

    @rule(by=BY, user=USERS, banned=st.booleans())
    def ban(self, by: tuple[str, bool], user: str, banned: bool) -> None:
        before, was, halted = dict(self.members), user in self.banned, self.halted
        role = before.get(user, "member")
        allowed = self.outranks(by, role) and role != "owner" and (by[1] or by[0] != user)
        said = self.ask(ChangeBan(self.act(*by), "c", user, banned))
        if isinstance(said, ChangePlan):
            assert (
                allowed
                and (user in self.banned) is banned
                and (said.event is None) is (was == banned)
            )
            assert said.event is None or not halted
            assert self.members == {
                name: role for name, role in before.items() if name != user or not banned
            }
        else:
            assert self.members == before and (user in self.banned) is was
            full = banned and len(self.banned) >= LIMITS.bans_max * (2 if by[1] else 1)
            assert not allowed or halted or full or not (was or banned), said

    @rule(by=BY, user=USERS, muted=st.booleans())
    def mute(self, by: tuple[str, bool], user: str, muted: bool) -> None:
        was, halted, role = user in self.mutes, self.halted, self.members.get(user, "member")
        known = user in self.members or was
        allowed = known and role != "owner" and self.outranks(by, role) and (by[1] or by[0] != user)
        kept = not muted and self.operators_mute(by, user)
        takes_over = muted and was and by[1] and not self.mutes[user].by_operator
        said = self.ask(ChangeMute(self.act(*by), "c", user, muted))
        assert (user in self.mutes) is (muted if isinstance(said, ChangePlan) else was)
        if isinstance(said, ChangePlan):
            assert allowed and not kept and (said.event is None) is (was == muted)
            assert not halted or (said.event is None and not takes_over)
        else:
            full = muted and not was and len(self.mutes) >= LIMITS.mutes_max * (2 if by[1] else 1)
            assert not allowed or halted or kept or full or not (was or muted), said

    @rule(by=BY)
    def halt(self, by: tuple[str, bool]) -> None:
        before = self.halted
        said = self.ask(HaltChat(self.act(*by), "c"))
        assert isinstance(said, ChangePlan) is by[1] and self.halted is (before or by[1])

    @rule(by=BY, lost=st.booleans())
    def recover(self, by: tuple[str, bool], lost: bool) -> None:
        """The counter is right or lost; numbers continue above all that is stored."""
        assert self.chat is not None
        before, epoch, kept = self.highest, self.chat.epoch, self.counter
        self.counter = None if lost else kept
        said = self.ask(RecoverChat(self.act(*by), "c"))
        if not isinstance(said, ChangePlan):
            assert not by[1]
            self.counter = kept
            return
        assert by[1] and not self.halted and self.chat.epoch == epoch + 1
        assert (
            self.counter is not None and self.counter >= before and self.chat.head == self.counter
        )

    @rule(behind=st.integers(0, 2))
    def raise_epoch(self, behind: int) -> None:
        """Many nodes may notice the same rollback; the epoch rises once."""
        assert self.chat is not None
        epoch = self.chat.epoch
        said = self.ask(RaiseEpoch(self.act("ann", True), "c", epoch - behind))
        assert isinstance(said, ChangePlan) and self.chat.epoch == epoch + (behind == 0)

    @property
    def halted(self) -> bool:
        return self.chat is not None and self.chat.halted is not None

    @invariant()
    def the_chat_stays_one(self) -> None:
        if getattr(self, "chat", None) is not None:
            assert len(self.members) <= LIMITS.members_max
            assert not self.members or "owner" in self.members.values(), (
                "nobody is left who could add anybody"
            )
            assert self.counter is not None and self.counter >= self.highest
            assert not self.banned & self.members.keys() and len(self.banned) <= 2 * LIMITS.bans_max
            assert all(self.members.get(user) != "owner" for user in self.mutes), (
                "an owner is never muted"
            )


TestChatLife = ChatLife.TestCase
TestChatLife.settings = settings(max_examples=40, deadline=None)


def test_chat_without_retained_messages_recovers_above_them() -> None:
    """Counter lost, nothing stored: only the first sequence shows the used numbers."""
    chat = Chat("c", "t", "group", "Team", 1, 7, 8, "lost", "ann", "now")
    act = CommandContext(User("t", "ann"), "now", "m", operator=True)
    plan = decide(RecoverChat(act, "c"), CommandInputs(chat, counter=None, highest=0), LIMITS)
    assert plan.counter == 7 and plan.chat.head == 7 and plan.chat.epoch == 2
