"""Who is here: by user, by device, by chat."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.message import User
from holdfast.session.roster import Roster

ANN, BOB = User("default", "ann"), User("default", "bob")


@dataclass(eq=False)
class Here:
    user: User
    device_id: str = "phone"
    chats: set[str] = field(default_factory=set)

    def reads(self, chat_id: str) -> bool:
        return True


def roster() -> Roster[Here]:
    return Roster(connections_max=5)


def test_a_session_is_found_by_its_user_and_after_its_hello_by_its_chats() -> None:
    here, session = roster(), Here(ANN, chats={"chat_1", "chat_2"})
    assert here.add(session) == []
    assert here.of_user(ANN) == (session,)
    assert here.in_chat("chat_1") == ()
    here.establish(session)
    assert here.in_chat("chat_1") == here.in_chat("chat_2") == (session,)
    assert set(here.chats) == {"chat_1", "chat_2"}


def test_a_devices_new_socket_replaces_its_old_one() -> None:
    here, old, new = roster(), Here(ANN, chats={"chat_1"}), Here(ANN, chats={"chat_1"})
    here.add(old)
    here.establish(old)
    assert here.add(new) == [old]
    here.establish(new)
    assert here.of_user(ANN) == here.in_chat("chat_1") == (new,)
    here.remove(old)
    assert here.of_user(ANN) == here.in_chat("chat_1") == (new,), (
        "the old one's end is not the new one's"
    )


def test_a_sixth_device_closes_the_oldest() -> None:
    here = roster()
    sessions = [Here(ANN, f"device_{n}") for n in range(6)]
    displaced = [here.add(session) for session in sessions]
    assert displaced == [[], [], [], [], [], [sessions[0]]]
    assert here.of_user(ANN) == tuple(sessions[1:])
    assert len(here) == 5


def test_a_device_that_came_back_is_the_newest() -> None:
    here = roster()
    sessions = [Here(ANN, f"device_{n}") for n in range(5)]
    for session in sessions:
        here.add(session)
    assert here.add(Here(ANN, "device_0")) == [sessions[0]]
    assert here.add(Here(ANN, "device_9")) == [sessions[1]]


def test_the_same_device_name_of_another_user_or_tenant_is_another_device() -> None:
    here = roster()
    sessions = [Here(ANN), Here(BOB), Here(User("other", "ann"))]
    assert [here.add(session) for session in sessions] == [[], [], []]
    assert len(here) == 3


def test_session_joins_and_leaves_a_chat_once() -> None:
    here = roster()
    phone, laptop, bob = Here(ANN), Here(ANN, "laptop"), Here(BOB)
    for session in (phone, laptop, bob):
        here.add(session)
    for session in (phone, laptop, phone, bob):
        here.join(session, "chat_1")
    assert here.in_chat("chat_1") == (phone, laptop, bob)
    here.leave(phone, "chat_1")
    here.leave(phone, "chat_1")
    assert here.in_chat("chat_1") == (laptop, bob)


def test_a_session_that_ends_before_its_hello_leaves_nothing_behind() -> None:
    here, session = roster(), Here(ANN, chats={"chat_2"})
    here.add(session)
    here.join(session, "chat_1")
    here.remove(session)
    here.join(session, "chat_1")
    here.establish(session)
    assert (here.in_chat("chat_1"), list(here.chats), list(here.users), len(here)) == (
        (),
        [],
        [],
        0,
    )


def test_delivery_reaches_the_sessions_present_when_it_began() -> None:
    here = roster()
    sessions = [Here(ANN, f"device_{n}", {"chat_1"}) for n in range(3)]
    for session in sessions:
        here.add(session)
        here.establish(session)
    reached = []
    for session in here.in_chat("chat_1"):
        here.remove(session)
        reached.append(session)
    assert reached == sessions


def test_a_user_needs_at_least_one_connection() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Roster(connections_max=0)


class Comings(RuleBasedStateMachine):
    """The roster against the simplest model: a list of sessions with chats."""

    def __init__(self) -> None:
        super().__init__()
        self.roster: Roster[Here] = Roster(connections_max=2)
        self.here: list[Here] = []
        self.gone: list[Here] = []
        self.members: dict[str, set[User]] = {"chat_1": set(), "chat_2": set()}

    @rule(user=st.sampled_from([ANN, BOB]), device=st.sampled_from(["phone", "laptop", "watch"]))
    def comes(self, user: User, device: str) -> None:
        chats = {chat_id for chat_id, members in self.members.items() if user in members}
        session = Here(user, device, chats)
        mine = [other for other in self.here if other.user == user]
        same = [other for other in mine if other.device_id == device]
        rest = [other for other in mine if other.device_id != device]
        expected = same + rest[: max(len(rest) - 1, 0)]
        assert self.roster.add(session) == expected
        self.here = [other for other in self.here if other not in expected] + [session]
        self.gone += expected
        self.roster.establish(session)

    @rule(at=st.integers(0, 20))
    def goes(self, at: int) -> None:
        if self.here:
            session = self.here.pop(at % len(self.here))
            self.roster.remove(session)
            self.gone.append(session)

    @rule(at=st.integers(0, 20))
    def goes_again(self, at: int) -> None:
        if self.gone:
            self.roster.remove(self.gone[at % len(self.gone)])

    @rule(user=st.sampled_from([ANN, BOB]), chat_id=st.sampled_from(["chat_1", "chat_2"]))
    def joins(self, user: User, chat_id: str) -> None:
        self.members[chat_id].add(user)
        for session in self.roster.of_user(user):
            self.roster.join(session, chat_id)

    @rule(user=st.sampled_from([ANN, BOB]), chat_id=st.sampled_from(["chat_1", "chat_2"]))
    def leaves(self, user: User, chat_id: str) -> None:
        self.members[chat_id].discard(user)
        for session in self.roster.of_user(user):
            self.roster.leave(session, chat_id)

    @invariant()
    def everybody_is_found_and_nobody_else(self) -> None:
        assert len(self.roster) == len(self.here)
        assert set(self.roster.users) == {session.user for session in self.here}
        for user in (ANN, BOB):
            mine = [session for session in self.here if session.user == user]
            assert sorted(map(id, self.roster.of_user(user))) == sorted(map(id, mine))
            assert len(mine) <= 2
        for chat_id, members in self.members.items():
            inside = [session for session in self.here if session.user in members]
            assert sorted(map(id, self.roster.in_chat(chat_id))) == sorted(map(id, inside))
        assert set(self.roster.chats) == {c for c in self.members if self.roster.in_chat(c)}


Comings.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestComings = Comings.TestCase


def seconds_of_a_storm(size: int) -> float:
    """Processor time for sessions to join and leave ten chats, best of three."""
    chats = {f"chat_{n}" for n in range(10)}
    took = []
    for _ in range(3):
        here: Roster[Here] = roster()
        sessions = [Here(User("default", f"user_{n}"), chats=chats) for n in range(size)]
        begun = time.process_time()
        for session in sessions:
            here.add(session)
            here.establish(session)
        assert len(here.in_chat("chat_1")) == size
        for session in sessions:
            here.remove(session)
        took.append(time.process_time() - begun)
        assert not here.chats
    return min(took)


def test_coming_and_going_costs_the_same_however_many_are_there() -> None:
    few, many = seconds_of_a_storm(400), seconds_of_a_storm(4000)
    assert many < 30 * few, f"ten times as many took {many / few:.0f} times as long"


def test_iteration_over_a_chats_sessions_sees_no_later_change() -> None:
    here, sessions = (
        roster(),
        [Here(User("default", f"user_{n}"), chats={"chat_1"}) for n in range(3)],
    )
    for session in sessions:
        here.add(session)
        here.establish(session)
    for session in (seen := here.in_chat("chat_1")):
        here.remove(session)
    assert seen == tuple(sessions)
    assert here.in_chat("chat_1") == ()
