"""What operators do: with a key, a scope and a reason, and never without a record."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from api_rig import Rest, error_of, serving
from msgspec.structs import replace

from holdfast.access.contract import Credentials
from holdfast.access.keys import KeyRing, new_key
from holdfast.access.secrets import FileCredentials, open_secrets
from holdfast.api.deps import ApiSettings, Backup, BackupStep, PresenceView
from holdfast.clock import ManualClock
from holdfast.errors import (
    DiskFull,
    HoldfastError,
    InternalError,
    OutcomeUnknown,
    StateDirectory,
    Unavailable,
)
from holdfast.message import Chat, Draft, User
from holdfast.store.commands import RETAIN_AT_ONCE, Command, CommandContext, CommandResult, Retain
from holdfast.store.contract import Inspection
from holdfast.store.memory import MemoryStore

AT = "2026-01-01T00:00:00.000Z"


async def actions(rest: Rest) -> list[tuple[str, str]]:
    return [
        (record.action, record.reason) for record in (await rest.store.audit(None, 100)).records
    ]


async def test_halting_and_recovering_a_chat_is_recorded_with_who_and_why() -> None:
    async with serving() as rest:
        chat, admin = await rest.chat(), rest.admin_key()
        await rest.send(chat, "before", "k1")
        assert (
            await rest.ask("POST", f"/admin/chats/{chat}/halt", admin, {"reason": "looks odd"})
        ).status_code == 200
        assert error_of(await rest.send(chat, "during", "k2")) == (503, "CHAT_HALTED")
        recovered = await rest.ask(
            "POST", f"/admin/chats/{chat}/recover", admin, {"reason": "was fine"}
        )
        assert recovered.json()["chat"]["epoch"] == 2
        assert (await rest.send(chat, "after", "k3")).status_code == 201
        records = (await rest.ask("GET", "/admin/audit", admin)).json()["records"]
        assert [(r["action"], r["target"], r["reason"]) for r in records] == [
            ("chat.halt", chat, "looks odd"),
            ("chat.recover", chat, "was fine"),
        ]
        assert {r["actor"] for r in records} == {rest.deps.keys.list()[0].key_id}
        first = (await rest.ask("GET", "/admin/audit?limit=1", admin)).json()
        for after in (first["next"], "1"):
            later = (await rest.ask("GET", f"/admin/audit?after={after}&limit=1", admin)).json()
            assert [r["number"] for r in later["records"]] == [2] and later["next"] is None
        for unknown in ("audit.77", "texts.1", "-1", f"{2**53}", "x", ""):
            refused = await rest.ask("GET", f"/admin/audit?after={unknown}", admin)
            assert error_of(refused) == (400, "INVALID_MESSAGE")
            assert "start again without `after`" in refused.text


async def test_why_a_chat_was_halted_is_between_operators() -> None:
    async with serving() as rest:
        chat, admin, alice = await rest.chat(), rest.admin_key(), rest.token("alice")
        halted = await rest.ask(
            "POST", f"/admin/chats/{chat}/halt", admin, {"reason": "carl is under suspicion"}
        )
        assert halted.json()["chat"]["halted"] == "carl is under suspicion"
        shown = [await rest.ask("GET", path, alice) for path in ("/v1/chats", f"/v1/chats/{chat}")]
        shown.append(await rest.ask("PATCH", f"/v1/chats/{chat}", alice, {"name": "other"}))
        shown.append(await rest.send(chat, "during", "k1"))
        for answer in shown:
            assert "carl" not in answer.text, answer.text
        assert (await rest.ask("GET", f"/v1/chats/{chat}", alice)).json()["chat"][
            "halted"
        ] == "ask the operator"
        inspected = await rest.ask("GET", f"/admin/chats/{chat}", admin)
        assert inspected.json()["chat"]["halted"] == "carl is under suspicion"


@pytest.mark.real_time
async def test_inspections_that_take_too_long_do_not_shut_the_reads_of_users() -> None:
    class Slow(MemoryStore):
        async def inspect(self, chat_id: str) -> Inspection:
            raise Unavailable("there was no time left to read; try again later")

    async with serving(store=Slow()) as rest:
        chat = await rest.chat("alice")
        for _ in range(20):
            assert (
                await rest.ask("GET", f"/admin/chats/{chat}", rest.admin_key())
            ).status_code == 503
        assert (
            await rest.ask("GET", f"/v1/chats/{chat}/messages", rest.token("alice"))
        ).status_code == 200


async def test_an_operator_inspects_a_chat_of_any_tenant_but_reads_no_message() -> None:
    async with serving() as rest:
        chat, admin = await rest.chat("carl", tenant="other"), rest.admin_key()
        await rest.send(chat, "private words", "k1", rest.token("carl", "other"))
        answer = await rest.ask("GET", f"/admin/chats/{chat}", admin)
        body = answer.json()
        assert (body["counter"], body["highest"], body["count"], body["gaps"]) == (1, 1, 1, [])
        assert "private words" not in answer.text
        assert error_of(await rest.ask("GET", f"/v1/chats/{chat}/messages", admin)) == (
            403,
            "FORBIDDEN",
        )
        assert error_of(await rest.ask("GET", "/admin/chats/chat_none", admin)) == (
            404,
            "NOT_FOUND",
        )


async def test_an_operator_redacts_a_message_by_a_recorded_act() -> None:
    async with serving() as rest:
        chat = await rest.chat()
        await rest.send(chat, "a secret", "k1")
        body = {"sequence": 1, "reason": "ticket 42"}
        assert (
            await rest.ask("POST", f"/admin/chats/{chat}/redact", rest.admin_key(), body)
        ).status_code == 200
        page = await rest.ask("GET", f"/v1/chats/{chat}/messages", rest.token("alice"))
        assert "a secret" not in page.text
        assert await actions(rest) == [("message.redact", "ticket 42")]


async def test_an_operator_deletes_the_oldest_messages_in_bounded_recorded_steps() -> None:
    async with serving() as rest:
        chat = await rest.chat()
        user, many = User("acme", "alice"), RETAIN_AT_ONCE + 10
        for start in range(0, many, 500):
            sends = [
                Draft(user, chat, f"k{n}", "x", "text/plain", f"msg_{n}", AT)
                for n in range(start, start + 500)
            ]
            await rest.store.append(sends)
        path, body = f"/admin/chats/{chat}/retain", {"first_sequence": many, "reason": "90 days"}
        answer = await rest.ask("POST", path, rest.admin_key(), body)
        assert answer.json()["chat"]["first_sequence"] == many
        page = await rest.ask(
            "GET", f"/v1/chats/{chat}/messages?after=0&limit=1", rest.token("alice")
        )
        assert page.json()["messages"][0]["sequence"] == many
        assert await actions(rest) == [("chat.retain", "90 days")] * 2
        too_far = await rest.ask(
            "POST", path, rest.admin_key(), {"first_sequence": 10**6, "reason": "all"}
        )
        assert error_of(too_far) == (400, "INVALID_MESSAGE")


class Slow(MemoryStore):
    """Its reads of a chat and its deletions take ``seconds``."""

    seconds = 0.0
    clock: ManualClock

    async def chat(self, chat_id: str, reader: User | None = None) -> Chat:
        self.clock.advance(self.seconds)
        return await super().chat(chat_id, reader)

    async def change(self, command: Command) -> CommandResult:
        if isinstance(command, Retain):
            self.clock.advance(self.seconds)
        return await super().change(command)


@pytest.mark.parametrize("act", ["read", "halt"])
async def test_late_steps_of_a_request_share_its_deadline(
    act: str,
) -> None:
    store = Slow()

    async with serving(ApiSettings(request_seconds_max=5), store=store) as rest:
        chat, store.clock, store.seconds = await rest.chat(), rest.clock, 5
        if act == "read":
            answer = await rest.ask("GET", f"/v1/chats/{chat}/messages", rest.token("alice"))
        else:
            answer = await rest.ask(
                "POST", f"/admin/chats/{chat}/halt", rest.admin_key(), {"reason": "odd"}
            )
            assert answer.json()["error"]["outcome"] == "rejected" and await actions(rest) == []
        assert error_of(answer) == (503, "SERVICE_UNAVAILABLE")


class SmallSteps(Slow):
    """Deletes one message per commit."""

    async def change(self, command: Command) -> CommandResult:
        if isinstance(command, Retain):
            first = (await MemoryStore.chat(self, command.chat_id)).first_sequence
            command = replace(command, first_sequence=min(command.first_sequence, first + 1))
        return await super().change(command)


async def test_a_deletion_that_takes_long_ends_in_time_and_the_next_goes_on() -> None:
    store = SmallSteps()
    async with serving(ApiSettings(request_seconds_max=5), store=store) as rest:
        chat, store.clock = await rest.chat(), rest.clock
        for n in range(5):
            await rest.send(chat, "x", f"k{n}")
        store.seconds, firsts = 0.9, list[int]()
        while not firsts or firsts[-1] < 5:
            body = {"first_sequence": 5, "reason": "90 days"}
            answer = await rest.ask("POST", f"/admin/chats/{chat}/retain", rest.admin_key(), body)
            firsts.append(answer.json()["chat"]["first_sequence"])
        assert firsts == [3, 5]


@pytest.mark.parametrize("body", [{}, {"reason": ""}, {"reason": "x" * 501}, {"reason": 1}])
@pytest.mark.parametrize(
    "path", ["/admin/chats/{chat}/halt", "/admin/chats/{chat}/recover", "/admin/backup"]
)
async def test_an_act_without_a_reason_is_refused(path: str, body: object) -> None:
    async with serving() as rest:
        chat = await rest.chat()
        answer = await rest.ask("POST", path.format(chat=chat), rest.admin_key(), body)
        assert error_of(answer) == (400, "INVALID_MESSAGE")
        assert await actions(rest) == []


async def test_a_key_is_shown_once_works_at_once_and_is_recorded() -> None:
    async with serving() as rest:
        admin = rest.admin_key()
        body = {"kind": "tenant", "tenant": "acme", "label": "backend", "reason": "new shop"}
        issued = (await rest.ask("POST", "/admin/keys", admin, body)).json()
        assert (
            await rest.ask("GET", "/v1/chats", issued["secret"], X_Act_As="alice")
        ).status_code == 200
        listed = await rest.ask("GET", "/admin/keys", admin)
        assert issued["secret"] not in listed.text and "digest" not in listed.text
        assert issued["key"] in listed.json()["keys"]
        key_id = issued["key"]["key_id"]
        gone = await rest.ask("DELETE", f"/admin/keys/{key_id}?reason=leaked", admin)
        assert gone.json() == issued["key"]
        assert (
            error_of(await rest.ask("GET", "/v1/chats", issued["secret"], X_Act_As="alice"))[0]
            == 401
        )
        assert error_of(await rest.ask("DELETE", f"/admin/keys/{key_id}?reason=again", admin)) == (
            404,
            "NOT_FOUND",
        )
        assert error_of(await rest.ask("DELETE", f"/admin/keys/{key_id}", admin)) == (
            400,
            "INVALID_MESSAGE",
        )
        assert await actions(rest) == [("key_issued", "new shop"), ("key_revoked", "leaked")]
        assert issued["secret"] not in repr((await rest.store.audit(None, 10)).records)


async def test_refusal_for_a_scope_names_the_command_that_makes_a_key() -> None:
    async with serving() as rest:
        admin, backend = rest.admin_key("status:read"), rest.tenant_key(scopes=["chats:read"])
        for method, path, who, command in (
            (
                "GET",
                "/admin/rules",
                admin,
                "holdfast key create admin --label LABEL --scope rules:read",
            ),
            (
                "POST",
                "/v1/tokens",
                backend,
                "holdfast key create tenant --tenant acme --label LABEL --scope tokens:write",
            ),
        ):
            refused = await rest.ask(method, path, who)
            scope = command.split()[-1]
            assert error_of(refused) == (403, "FORBIDDEN")
            assert refused.json()["error"]["details"] == {"scope": scope}
            assert (
                refused.json()["error"]["message"]
                == f"this key lacks the scope {scope}; make one that has it: {command}"
            )


async def test_a_key_hands_out_only_scopes_it_carries() -> None:
    async with serving() as rest:
        clerk = rest.admin_key("keys:write", "status:read")
        body = {"kind": "admin", "label": "x", "reason": "test"}
        refused = await rest.ask("POST", "/admin/keys", clerk, {**body, "scopes": ["backup"]})
        assert error_of(refused) == (403, "FORBIDDEN")
        assert "yours lacks backup" in refused.json()["error"]["message"]
        assert "without --token" in refused.json()["error"]["message"]
        granted = await rest.ask("POST", "/admin/keys", clerk, body)
        assert granted.json()["key"]["scopes"] == ["keys:write", "status:read"]


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "root"},
        {"tenant": ""},
        {"tenant": "a b"},
        {"scopes": []},
        {"scopes": ["backup"]},
        {"label": ""},
        {"label": "a\nb"},
        {"scopes": ["everything"]},
        {"secret": "hf_tenant_mine"},
    ],
)
async def test_a_key_that_cannot_be_is_refused(changed: dict[str, object]) -> None:
    async with serving() as rest:
        body = {"kind": "tenant", "tenant": "acme", "label": "backend", "reason": "test", **changed}
        admin = rest.admin_key()
        assert error_of(await rest.ask("POST", "/admin/keys", admin, body)) == (
            400,
            "INVALID_MESSAGE",
        )
        assert len(rest.deps.keys.list()) == 1 and await actions(rest) == []


async def test_the_last_key_that_can_make_keys_is_revoked_by_force_only() -> None:
    async with serving() as rest:
        admin = rest.admin_key()
        path = f"/admin/keys/{rest.deps.keys.list()[0].key_id}?reason=x"
        for unforced in ("", "&force=false"):
            answer = await rest.ask("DELETE", path + unforced, admin)
            assert (
                error_of(answer) == (403, "FORBIDDEN")
                and "last key" in answer.json()["error"]["message"]
            )
        assert error_of(await rest.ask("DELETE", path + "&force=perhaps", admin)) == (
            400,
            "INVALID_MESSAGE",
        )
        assert (await rest.store.audit(None, 10)).records == [], (
            "what is refused is not recorded as done"
        )
        assert (await rest.ask("DELETE", path + "&force=true", admin)).status_code == 200
        assert error_of(await rest.ask("GET", "/admin/keys", admin)) == (401, "UNAUTHORIZED")


class Unrecording(MemoryStore):
    """A store whose audit log fails, with a known or an unknown outcome."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__()
        self.error = error

    async def record(
        self, act: CommandContext, action: str, target: str, details: str = ""
    ) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error", [Unavailable("the audit log is unavailable"), OutcomeUnknown("no answer in time")]
)
async def test_without_a_record_there_is_no_key_no_revocation_and_no_backup(
    error: HoldfastError,
) -> None:
    taken: list[int] = []

    async def backup() -> Backup:
        taken.append(1)
        return Backup("x", 1)

    async with serving(store=Unrecording(error), backup=backup) as rest:
        admin = rest.admin_key()
        body = {"kind": "tenant", "tenant": "acme", "label": "backend", "reason": "test"}
        for method, path, sent in (
            ("POST", "/admin/keys", body),
            ("DELETE", f"/admin/keys/{rest.deps.keys.list()[0].key_id}?reason=x&force=true", None),
            ("POST", "/admin/backup", {"reason": "nightly"}),
        ):
            answer = await rest.ask(method, path, admin, sent)
            assert error_of(answer) == (503, "SERVICE_UNAVAILABLE")
            assert answer.json()["error"]["outcome"] == "rejected"
        assert len(rest.deps.keys.list()) == 1 and not taken
        assert (await rest.ask("GET", "/admin/status", admin)).status_code == 200


async def test_a_backup_is_recorded_and_says_where_it_lies() -> None:
    async with serving() as rest:
        answer = await rest.ask(
            "POST", "/admin/backup", rest.admin_key("backup"), {"reason": "nightly"}
        )
        assert answer.json()["path"] == "backups/one" and answer.json()["files"][0]["counts"] == {
            "chats": 1
        }
        assert await actions(rest) == [("backup", "nightly")]
        assert (await rest.ask("GET", "/admin/backup", rest.admin_key("backup"))).json() == {
            "step": None
        }


async def test_running_backup_shows_its_step_and_a_second_is_refused() -> None:
    async with serving(backup_step=lambda: BackupStep("copying chats.db", 1, 2)) as rest:
        key = rest.admin_key("backup")
        answer = await rest.ask("GET", "/admin/backup", key)
        assert answer.json() == {
            "step": {"doing": "copying chats.db", "done_bytes": 1, "total_bytes": 2}
        }
        refused = await rest.ask("POST", "/admin/backup", key, {"reason": "nightly"})
        assert error_of(refused) == (503, "SERVER_BUSY") and "copying chats.db" in refused.text
        assert await actions(rest) == []


async def test_backup_of_a_node_of_a_cluster_is_refused_and_says_what_to_do() -> None:
    async with serving(backup=None) as rest:
        key = rest.admin_key("backup")
        refused = await rest.ask("POST", "/admin/backup", key, {"reason": "nightly"})
        assert error_of(refused) == (400, "INVALID_MESSAGE")
        assert "pg_dump" in refused.text and "holdfast chat raise-epochs" in refused.text
        assert (await rest.ask("GET", "/admin/backup", key)).json() == {"step": None}
        assert await actions(rest) == []


async def test_keys_issued_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    open_secrets(tmp_path, "2026-01-01T00:00:00.000Z")
    store = FileCredentials(tmp_path)
    async with serving(keys=await KeyRing.load(store)) as rest:
        admin = rest.admin_key()
        body = {"kind": "tenant", "tenant": "acme", "label": "backend", "reason": "test"}
        answers = await asyncio.gather(
            *(rest.ask("POST", "/admin/keys", admin, body) for _ in range(10))
        )
        again = await KeyRing.load(store)
        for answer in answers:
            assert again.find(answer.json()["secret"]).principal("alice").user == User(
                "acme", "alice"
            )


async def test_a_keyed_halt_is_done_once() -> None:
    async with serving() as rest:
        chat, admin = await rest.chat(), rest.admin_key()
        path = f"/admin/chats/{chat}/recover"
        first = await rest.ask("POST", path, admin, {"reason": "x"}, Idempotency_Key="r1")
        again = await rest.ask("POST", path, admin, {"reason": "x"}, Idempotency_Key="r1")
        assert first.json() == again.json() and first.json()["chat"]["epoch"] == 2
        assert (await rest.store.chat(chat)).epoch == 2


async def test_internal_trouble_is_shown_to_operators_only(
    tmp_path: Path,
) -> None:
    async def full() -> Backup:
        raise DiskFull(
            "/srv/backups cannot be written: No space left on device; make room, and do it again"
        )

    troubles = [
        StateDirectory("/srv/secret/place is read-only"),
        InternalError("KeyError: /srv/secret/place"),
    ]

    async def unmintable(users: object) -> PresenceView:
        raise troubles.pop()

    async with serving(backup=full, presence=unmintable) as rest:
        admin = rest.admin_key()
        answer = await rest.ask("POST", "/admin/backup", admin, {"reason": "nightly"})
        assert error_of(answer) == (507, "INSUFFICIENT_STORAGE") and "make room" in answer.text
        assert answer.json()["error"]["outcome"] == "rejected"
        chat = await rest.chat()
        for _ in range(len(troubles)):
            hidden = await rest.ask("GET", f"/v1/chats/{chat}/presence", rest.token("alice"))
            assert error_of(hidden) == (500, "INTERNAL_ERROR") and "/srv" not in hidden.text


async def test_a_key_that_cannot_be_saved_is_not_issued_and_the_operator_learns_why(
    tmp_path: Path,
) -> None:
    gone = tmp_path / "not there"

    first, secret = new_key("admin", "operator", "2026-01-01T00:00:00.000Z")
    loaded = Credentials([], [first], "")
    async with serving(keys=KeyRing(FileCredentials(gone), loaded)) as rest:
        admin = rest.deps.keys.list()
        body = {"kind": "tenant", "tenant": "acme", "label": "backend", "reason": "test"}
        answer = await rest.ask("POST", "/admin/keys", secret, body)
        assert error_of(answer) == (500, "INTERNAL_ERROR") and "cannot be written" in answer.text
        assert rest.deps.keys.list() == admin and await actions(rest) == []
