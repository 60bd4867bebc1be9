"""Nobody sees another tenant's data, or a chat they are not in: whatever is asked, by
whom, in whatever order.

Every chat's name and every message carries a mark. After each request of a random
history the answer may hold only marks of chats whose member the asking user is, by a
model kept beside the server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import httpx
from api_rig import Rest, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.message import User

MARK = re.compile(r"mark-(\d+)-")
PEOPLE = [User(tenant, name) for tenant in ("acme", "evil") for name in ("ann", "ben", "cat")]

who = st.sampled_from(PEOPLE)
name = st.sampled_from(["ann", "ben", "cat"])
number = st.integers(0, 7)
by_key = st.booleans()
place = st.sampled_from(["", "?after=0", "?before=5", "?around=1", "?around=2&limit=1"])
look = st.sampled_from(["", "/members", "/presence", "/messages/1/status", "/messages/2/status"])
step = st.one_of(
    st.tuples(st.just("create"), who, by_key, name),
    st.tuples(st.just("direct"), who, by_key, name),
    st.tuples(st.just("send"), who, by_key, number, number),
    st.tuples(st.just("add"), who, by_key, number, name),
    st.tuples(st.just("remove"), who, by_key, number, name),
    st.tuples(st.just("rename"), who, by_key, number),
    st.tuples(st.just("redact"), who, by_key, number, number),
    st.tuples(st.just("read"), who, by_key, number, place),
    st.tuples(st.just("look"), who, by_key, number, look),
    st.tuples(st.just("list"), who, by_key),
    st.tuples(st.just("page"), who, by_key, number),
)


@dataclass
class Model:
    """Which chats there are, in the order of their creation, and who is in them."""

    chats: list[str] = field(default_factory=list)
    members: list[set[User]] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def key(self, rest: Rest, tenant: str) -> str:
        if tenant not in self.keys:
            self.keys[tenant] = rest.tenant_key(tenant)
        return self.keys[tenant]

    def chat(self, chosen: int) -> str:
        return self.chats[chosen % len(self.chats)] if self.chats else "chat_none"

    def number_of(self, chat_id: str) -> int:
        return self.chats.index(chat_id)


async def request(rest: Rest, model: Model, step: tuple[object, ...]) -> httpx.Response:
    kind, user, keyed, *rest_of = step
    assert isinstance(user, User)
    bearer = model.key(rest, user.tenant) if keyed else rest.token(user.user_id, user.tenant)
    headers = {"X_Act_As": user.user_id} if keyed else {}
    if kind in ("create", "direct"):
        mark = f"mark-{len(model.chats)}-"
        group = {"name": mark, "members": [rest_of[0]]}
        body = group if kind == "create" else {"kind": "direct", "members": [rest_of[0]]}
        return await rest.ask("POST", "/v1/chats", bearer, body, **headers)
    if kind == "list":
        return await rest.ask("GET", "/v1/chats", bearer, **headers)
    assert isinstance(rest_of[0], int)
    chat = model.chat(rest_of[0])
    at = f"/v1/chats/{chat}"
    mark = f"mark-{model.number_of(chat)}-" if model.chats else "mark-0-"
    match kind:
        case "page":
            return await rest.ask("GET", f"/v1/chats?limit=1&after={chat}", bearer, **headers)
        case "send":
            headers["Idempotency_Key"] = f"key-{rest_of[1]}"
            return await rest.ask(
                "POST", at + "/messages", bearer, {"content": mark + str(rest_of[1])}, **headers
            )
        case "add":
            return await rest.ask(
                "POST", at + "/members", bearer, {"user_id": rest_of[1]}, **headers
            )
        case "remove":
            return await rest.ask("DELETE", f"{at}/members/{rest_of[1]}", bearer, **headers)
        case "rename":
            return await rest.ask("PATCH", at, bearer, {"name": mark + "renamed"}, **headers)
        case "redact":
            return await rest.ask("DELETE", f"{at}/messages/{rest_of[1]}", bearer, **headers)
        case "read":
            return await rest.ask("GET", f"{at}/messages{rest_of[1]}", bearer, **headers)
        case _:
            return await rest.ask("GET", at + str(rest_of[1]), bearer, **headers)


async def check(rest: Rest, model: Model, step: tuple[object, ...]) -> None:
    kind, user, *_ = step
    assert isinstance(user, User)
    answer = await request(rest, model, step)
    assert answer.status_code < 500, answer.text
    before = [set(members) for members in model.members]
    if answer.status_code in (200, 201):
        follow(model, step, answer)
    inside = {
        n
        for n in range(len(model.chats))
        if user in model.members[n] or (n < len(before) and user in before[n])
    }
    shown = {int(n) for n in MARK.findall(answer.text)}
    shown |= {model.number_of(chat) for chat in re.findall(r'"chat_id":"(chat_\w+)"', answer.text)
              if answer.status_code < 400}  # fmt: skip
    assert shown <= inside, f"{user} was shown chats {shown - inside} by {step}: {answer.text}"
    if answer.status_code in (200, 201) and kind in (
        "send",
        "add",
        "rename",
        "redact",
        "read",
        "look",
        "remove",
    ):
        assert isinstance(step[3], int)
        assert user in before[step[3] % len(before)], f"{user} did {step} without being a member"
    model.seen |= {answer.status_code}


def follow(model: Model, step: tuple[object, ...], answer: httpx.Response) -> None:
    """The model does what the server said it did."""
    kind, user, _, *rest_of = step
    assert isinstance(user, User)
    if kind in ("create", "direct") and answer.status_code == 201:
        model.chats.append(answer.json()["chat"]["chat_id"])
        model.members.append({user, User(user.tenant, str(rest_of[0]))})
    elif kind in ("add", "remove"):
        assert isinstance(rest_of[0], int)
        other = User(user.tenant, str(rest_of[1]))
        members = model.members[rest_of[0] % len(model.members)]
        (members.add if kind == "add" else members.discard)(other)


@given(st.lists(step, min_size=20, max_size=50))
@settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
async def test_no_history_of_requests_shows_anybody_what_is_not_theirs(
    steps: list[tuple[object, ...]],
) -> None:
    async with serving() as rest:
        model = Model()
        await check(rest, model, ("create", PEOPLE[0], False, "ben"))
        await check(rest, model, ("create", PEOPLE[3], False, "ben"))
        await check(rest, model, ("send", PEOPLE[0], False, 0, 0))
        await check(rest, model, ("send", PEOPLE[3], False, 1, 0))
        for each in steps:
            await check(rest, model, each)
        # To be sure, everybody looks at everything in the end.
        for user in PEOPLE:
            await check(rest, model, ("list", user, False))
            for n in range(len(model.chats)):
                for query in ("", "?after=0", "?around=1"):
                    await check(rest, model, ("read", user, False, n, query))
        assert {200, 201, 403, 404} <= model.seen
