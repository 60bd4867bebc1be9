"""The command line against a real server: every command, and a newcomer's failures."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import apsw
import jwt
import pytest
import typer.main
from program import PATIENCE_SECONDS, Program, Ran, eventually, patched_environment
from typer.testing import CliRunner

from engines import free_port
from holdfast.access.principal import USER_SCOPES
from holdfast.cli.app import app

COMMANDS = [
    (name, *under)
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    for under in ([(each,) for each in command.commands] if hasattr(command, "commands") else [()])
]
"""Every command as it is typed."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(tmp_path_factory.mktemp("cli") / "state")
    program.serve("--set", "durability.intake.hot_messages_per_minute=90")
    yield program
    program.stop()


@pytest.fixture
def nowhere(tmp_path: Path) -> Program:
    """Nothing runs here and nothing was ever started."""
    return Program(tmp_path / "state")


@pytest.fixture(scope="module")
def lobby(program: Program) -> str:
    return program.ok(
        "chat", "create", "--user", "alice", "--name", "lobby", "--member", "bob"
    ).strip()


# Help


def test_the_help_lists_every_command_and_a_tour(nowhere: Program) -> None:
    text = nowhere.ok("--help")
    for command in {parts[0] for parts in COMMANDS}:
        assert f"\n  {command} " in text
    assert "holdfast chat open lobby --user alice" in text


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_with_an_example(
    command: tuple[str, ...], nowhere: Program
) -> None:
    text = nowhere.ok(*command, "--help")
    assert f"holdfast {' '.join(command)}" in text.split("Example", 1)[1]


def test_completion_is_offered(nowhere: Program) -> None:
    # any shell may run us
    environment = {**nowhere.environment, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "holdfast.cli", "--show-completion", "bash"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert "holdfast" in done.stdout


# What goes wrong


def failed(done: Ran, code: int = 1) -> str:
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    return done.stderr


def test_without_a_state_directory_the_error_says_how_to_get_one(nowhere: Program) -> None:
    error = failed(nowhere.run("token", "--user", "alice"))
    assert "holdfast serve" in error and "--state-dir" in error


def test_without_a_server_the_error_says_how_to_start_one(program: Program) -> None:
    error = failed(
        program.run("chat", "list", "--user", "alice", "--url", f"http://127.0.0.1:{free_port()}")
    )
    assert "there is no server at" in error and "holdfast serve" in error


def test_url_of_another_server_is_reported_as_no_holdfast_server(program: Program) -> None:
    error = failed(program.run("chat", "list", "-u", "alice", "--url", f"{program.url}/elsewhere"))
    assert "NOT_FOUND" in error or "no Holdfast server" in error or "there is no" in error


@pytest.mark.parametrize(
    "url", ["nonsense", "http://[::1", "http://127.0.0.1:abc", "http://127.0.0.1:99999"]
)
def test_a_bad_address_is_named(program: Program, url: str) -> None:
    assert "http://127.0.0.1:8080" in failed(program.run("status", "--url", url))


@pytest.mark.parametrize(
    "given",
    [
        ("send", "lobby", "hello", "--user", "alice", "--key", "日本"),
        ("send", "lobby", "hello", "--user", "alice", "--key", "a\nb"),
        ("send", "lobby", "\udcff", "--user", "alice"),
        ("create", "--user", "alice", "--name", "\udcff"),
        ("list", "--token", "€"),
    ],
)
def test_unsendable_text_is_reported_and_not_sent(
    program: Program, lobby: str, given: tuple[str, ...]
) -> None:
    before = program.ok("chat", "history", lobby, "--user", "alice", "--json")
    assert "UTF-8" in failed(program.run("chat", *given))
    assert program.ok("chat", "history", lobby, "--user", "alice", "--json") == before


def test_piped_input_that_is_no_text_is_refused(program: Program, lobby: str) -> None:
    done = program.run("chat", "send", lobby, "-", "--user", "alice", stdin=b"\xff")
    assert "UTF-8" in failed(done)


def test_a_bad_token_says_how_to_make_a_good_one(program: Program) -> None:
    error = failed(program.run("chat", "list", "--token", "nonsense"))
    assert "holdfast token --user" in error


def test_an_expired_token_says_so(program: Program) -> None:
    secret = json.loads((program.state_dir / "secrets.json").read_text())["jwt_secret"]
    claims = {
        "iss": "holdfast",
        "aud": "holdfast",
        "sub": "alice",
        "tenant": "default",
        "iat": 1,
        "exp": 2,
    }
    error = failed(program.run("chat", "list", "--token", jwt.encode(claims, secret, "HS256")))
    assert "expired" in error and "holdfast token" in error


def test_a_command_without_a_user_asks_for_one(program: Program) -> None:
    assert "--user" in failed(program.run("chat", "list"))


def test_an_unknown_option_is_a_usage_error(nowhere: Program) -> None:
    assert "No such option" in failed(nowhere.run("status", "--nonsense"), code=2)


def test_an_error_can_be_json(program: Program) -> None:
    error = json.loads(failed(program.run("chat", "list", "--json")))
    assert error["error"]["code"] == "INVALID_MESSAGE"


def test_a_busy_port_is_named(program: Program, tmp_path: Path) -> None:
    done = program.run_process("serve", "--state-dir", str(tmp_path / "other"))
    assert f":{program.port}" in failed(done) and "--port" in done.stderr


def test_a_state_directory_in_use_names_its_holder(program: Program) -> None:
    error = failed(program.run_process("serve", "--port", str(free_port())))
    assert "in use by process" in error and "--state-dir" in error


def test_an_unknown_setting_is_named(nowhere: Program) -> None:
    assert "gateway.nonsense" in failed(nowhere.run("serve", "--set", "gateway.nonsense=1"))
    assert "PATH=VALUE" in failed(nowhere.run("serve", "--set", "nonsense"))


def test_a_public_address_is_refused_and_the_setting_named(nowhere: Program) -> None:
    assert "trusted_proxies" in failed(nowhere.run("serve", "--host", "0.0.0.0"))


def test_a_missing_settings_file_is_named(nowhere: Program) -> None:
    assert "nowhere.toml" in failed(nowhere.run("serve", "-c", "nowhere.toml"))
    assert "nowhere.toml" in failed(nowhere.run("-c", "nowhere.toml", "serve")), (
        "it means the same before the command"
    )


# What works


def test_hot_chats_are_listed_for_operators(
    program: Program,
) -> None:
    assert program.ok("chat", "list", "--hot").startswith("No chat had more than 90 messages")
    assert json.loads(program.ok("--json", "chat", "list", "--hot")) == []
    token = json.loads(program.ok("--json", "token", "--user", "alice"))["token"]
    assert "admin key" in failed(program.run("chat", "list", "--hot", "--token", token))


def test_secrets_are_private(program: Program) -> None:
    assert stat.S_IMODE((program.state_dir / "secrets.json").stat().st_mode) == 0o600


def test_a_token_works_everywhere(program: Program, lobby: str) -> None:
    made = json.loads(program.ok("token", "--user", "alice", "--hours", "1", "--json"))
    assert made["user_id"] == "alice"
    listed = json.loads(program.ok("--json", "chat", "list", "--token", made["token"]))
    assert lobby in [entry["chat"]["chat_id"] for entry in listed]
    assert "speaks for alice" in failed(
        program.run("chat", "list", "--token", made["token"], "--user", "bob")
    )


def test_a_token_carries_every_scope_unless_some_are_named(program: Program, lobby: str) -> None:
    claims = jwt.decode(
        program.ok("token", "-u", "alice").strip(), options={"verify_signature": False}
    )
    assert claims["holdfast_scopes"] == sorted(USER_SCOPES) and "chats" not in claims
    small = program.ok("token", "-u", "alice", "--scope", "chats:read", "--chat", lobby).strip()
    claims = jwt.decode(small, options={"verify_signature": False})
    assert (claims["holdfast_scopes"], claims["chats"]) == (["chats:read"], [lobby])
    assert "lacks the scope chats:create" in failed(
        program.run("chat", "create", "--name", "New", "--token", small)
    )
    assert "no scope 'chats:all'" in failed(
        program.run("token", "-u", "alice", "--scope", "chats:all")
    )


def test_a_token_is_made_for_the_issuer_of_the_settings_file(
    program: Program, tmp_path: Path
) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text(
        f"[server]\nport = {program.port}\nstate_dir ="
        f' "{program.state_dir}"\n[access.tokens]\nissuer = "elsewhere"\n'
    )
    token = program.ok("token", "-u", "alice", "-c", str(file)).strip()
    assert jwt.decode(token, options={"verify_signature": False})["iss"] == "elsewhere"
    assert "issuer" in failed(program.run("chat", "list", "--token", token))


def test_the_settings_file_names_the_server(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "holdfast.yaml"
    file.write_text(f"server: {{port: {program.port}, state_dir: {program.state_dir}}}\n")
    with patched_environment({"PATH": os.environ["PATH"]}):
        result = CliRunner().invoke(app, ["status", "-c", str(file)], prog_name="holdfast")
    assert result.exit_code == 0, result.stderr
    assert program.url in result.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_start_that_takes_long(number: signal.Signals, tmp_path: Path) -> None:
    program = Program(tmp_path / "state")
    program.state_dir.mkdir()
    held = apsw.Connection(str(program.state_dir / "chats.db"))
    held.execute("BEGIN EXCLUSIVE")
    patient = ("--set", "durability.sqlite.busy_timeout_seconds=60")
    starting = program.start("serve", *patient, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        eventually(
            lambda: (program.state_dir / "name.json").exists(),
            "the start to come to the database",
        )
        starting.send_signal(number)
        said, errors = starting.communicate(timeout=50)  # sooner than it would give up by itself
    finally:
        starting.kill()
        held.close()
    assert (starting.returncode, said, errors) == (
        128 + number,
        "",
        "Stopped before it had started.\n",
    )


STOPPED_AS_SOON_AS_IT_ANSWERS = """
import contextlib, os, signal, sys
from holdfast.cli import main
from holdfast.node import lifecycle

serving = lifecycle.serving

@contextlib.asynccontextmanager
async def answering(*parts):
    async with serving(*parts) as stop_accepting:
        os.kill(os.getpid(), signal.SIGTERM)
        yield stop_accepting

lifecycle.serving = answering
sys.argv[1:] = ["serve"]
main()
"""


def test_a_server_that_answers_can_be_stopped_and_drains(tmp_path: Path) -> None:
    """A server that has reported ready has ended its startup and drains."""
    program = Program(tmp_path / "state")
    stopped = subprocess.run(
        [sys.executable, "-c", STOPPED_AS_SOON_AS_IT_ANSWERS],
        env=program.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.splitlines()[-1].startswith("Stopping: ")


def test_status_says_that_the_server_is_ready(program: Program) -> None:
    assert "ready" in program.ok("status")
    assert json.loads(program.ok("status", "--json"))["ready"] is True


def test_the_doctor_without_a_key_sees_that_the_server_is_ready(
    program: Program, nowhere: Program, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.key"
    wrong.write_text("hf_admin_wrong")
    for own, said in (([], "give a key with --token-file"), (["--token-file", wrong], "API key")):
        done = nowhere.run("doctor", "--url", program.url, "--json", *map(str, own))
        (server,) = [each for each in json.loads(done.stdout) if each["check"] == "server"]
        assert server["grade"] == "look" and server["what"].startswith("is ready; ")
        assert said in server["what"]
    done = nowhere.run("doctor", "--json")
    (server,) = [each for each in json.loads(done.stdout) if each["check"] == "server"]
    assert server["grade"] == "bad" and "there is no server at" in server["what"]


def test_a_chat_is_made_found_by_title_written_to_and_read(program: Program) -> None:
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "den").strip()
    assert "dave is now member of den" in program.ok("chat", "invite", "den", "dave", "-u", "alice")
    assert "sent as message 2" in program.ok(
        "chat", "send", "den", "-", "-u", "dave", stdin="from a pipe\n"
    )
    assert "den" in program.ok("chat", "list", "-u", "dave")
    text = program.ok("chat", "history", "den", "-u", "alice")
    assert "alice added dave" in text and "dave: from a pipe" in text
    page = json.loads(
        program.ok("chat", "history", chat_id, "-u", "alice", "--json", "--after", "1")
    )
    assert [message["content"] for message in page["messages"]] == ["from a pipe"]


def test_a_key_makes_a_send_happen_once(program: Program, lobby: str) -> None:
    first = json.loads(
        program.ok("chat", "send", lobby, "once", "-u", "bob", "--key", "k", "--json")
    )
    again = json.loads(
        program.ok("chat", "send", lobby, "once", "-u", "bob", "--key", "k", "--json")
    )
    assert (first["deduplicated"], again["deduplicated"]) == (False, True)
    assert first["sequence"] == again["sequence"]
    assert "used" in failed(program.run("chat", "send", lobby, "other", "-u", "bob", "--key", "k"))


def test_a_direct_chat_is_unique(program: Program) -> None:
    one = program.ok("chat", "create", "-u", "alice", "--direct", "erin")
    assert program.ok("chat", "create", "-u", "erin", "--direct", "alice") == one
    assert "--direct alone" in failed(
        program.run("chat", "create", "-u", "alice", "--direct", "x", "-n", "y")
    )


def test_stranger_is_refused(program: Program, lobby: str) -> None:
    assert failed(program.run("chat", "history", lobby, "-u", "mallory"))
    assert "no chat titled" in failed(program.run("chat", "history", "lobby", "-u", "mallory"))
    assert failed(program.run("chat", "open", lobby, "-u", "mallory"))


def test_an_operator_inspects_halts_and_recovers(program: Program) -> None:
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "ward").strip()
    program.ok("chat", "send", chat_id, "one", "-u", "alice")
    program.ok("chat", "halt", chat_id, "--reason", "a drill")
    found = json.loads(program.ok("chat", "inspect", chat_id, "--json"))
    assert found["chat"]["halted"] and found["counter"] == 1
    assert failed(program.run("chat", "send", chat_id, "two", "-u", "alice", "--key", "held"))
    assert "epoch 2" in program.ok("chat", "recover", chat_id, "--reason", "the drill is over")
    program.ok("chat", "send", chat_id, "two", "-u", "alice", "--key", "held")
    shown = program.ok("chat", "inspect", chat_id)
    assert "halted         no" in shown and "gaps           none" in shown
    assert "Missing option" in failed(program.run("chat", "halt", chat_id), code=2)


def test_keys_are_made_used_listed_and_revoked(program: Program) -> None:
    made = json.loads(
        program.ok("key", "create", "admin", "--label", "watch", "--scope", "status:read", "--json")
    )
    secret, key_id = made["secret"], made["key"]["key_id"]
    assert program.run("status", "--token", secret).returncode == 0
    refused = failed(program.run("key", "list", "--token", secret))
    assert "lacks the scope keys:write" in refused
    command = refused.strip().partition("make one that has it: holdfast ")[2].split()
    assert program.ok("key", "list", "--token", program.ok(*command).split()[0]), (
        "what it says can be typed"
    )
    listed = program.ok("key", "list")
    assert key_id in listed and secret not in listed
    assert "is revoked" in program.ok("key", "revoke", key_id, "--reason", "done")
    assert failed(program.run("status", "--token", secret))
    assert "belongs to no tenant" in failed(
        program.run("key", "create", "admin", "--label", "x", "--tenant", "t")
    )
    tenant = program.run("key", "create", "tenant", "--label", "shop")
    assert tenant.stdout.startswith("hf_tenant_") and "cannot be shown again" in tenant.stderr


def test_acts_are_listed_and_their_chain_is_checked(program: Program) -> None:
    program.ok("key", "create", "tenant", "--label", "audited", "--reason", "for the audit")
    listed = program.ok("audit", "ls", "--limit", "500")
    assert "key_issued" in listed and "for the audit" in listed
    checked = json.loads(program.ok("audit", "check", "--json"))
    [last] = checked["last"].values()
    assert checked["records"] >= 1 and len(last) == 64
    assert "no chain is broken" in program.ok("audit", "check", "--seen", last)
    assert "records were removed or replaced" in failed(
        program.run("audit", "check", "--seen", "0" * 64)
    )


def test_operator_without_keys_makes_one_offline_and_nothing_is_void(tmp_path: Path) -> None:
    program = Program(tmp_path / "state")
    program.serve()
    try:
        token = program.ok("token", "-u", "alice").strip()
        backend = program.ok("key", "create", "tenant", "--label", "shop").split()[0]
        (own,) = [
            key for key in json.loads(program.ok("--json", "key", "list")) if key["kind"] == "admin"
        ]
        assert "last key that can make keys" in failed(program.run("key", "revoke", own["key_id"]))
        program.ok("key", "revoke", own["key_id"], "--force")
        assert "stop the server, then `holdfast key create admin" in failed(
            program.run("key", "list")
        )
        assert failed(program.run("key", "create", "admin", "--label", "back"))
        program.stop()
        named = failed(
            program.run("key", "create", "admin", "--label", "back", "--url", program.url)
        )
        assert f"the server of {program.state_dir} is stopped" in named
        assert "leave out --url and unset HOLDFAST_URL" in named and "--token" not in named
        named = failed(
            program.run("key", "create", "admin", "--label", "back", "--token", "hf_admin_old")
        )
        assert "leave out --token and unset HOLDFAST_TOKEN and HOLDFAST_TOKEN_FILE" in named
        back = program.run("key", "create", "admin", "--label", "back", "--reason", "locked out")
        assert (
            back.returncode == 0
            and "is stopped" in back.stderr
            and back.stdout.startswith("hf_admin_")
        )
        program.serve()
        assert program.ok("key", "list", "--token", back.stdout.strip())
        assert "back" in program.ok("key", "list"), "the state directory's own key works again"
        assert program.ok("--json", "chat", "list", "--token", token), "tokens go on"
        asked = {"Authorization": f"Bearer {backend}", "X-Act-As": "bob"}
        with urlopen(Request(f"{program.url}/v1/chats", headers=asked), timeout=10) as answer:
            assert answer.status == 200, "other keys go on"
    finally:
        program.stop()


def test_a_backup_is_taken_while_serving_and_restored_elsewhere(
    program: Program, tmp_path: Path
) -> None:
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "kept").strip()
    program.ok("chat", "send", chat_id, "before the backup", "-u", "alice")
    taken = json.loads(program.ok("backup", "--reason", "a test", "--json"))
    assert (Path(taken["path"]) / "manifest.json").exists() and taken["size_bytes"] > 0
    assert "in use by process" in failed(program.run("restore", taken["path"], "--overwrite"))
    other = Program(tmp_path / "other")
    done = other.run("restore", taken["path"])
    assert (
        "chats" in done.stdout and "in place in" in done.stdout and "no secrets.json" in done.stderr
    )
    assert "--overwrite" in failed(other.run("restore", taken["path"]))
    again = json.loads(
        other.ok("restore", taken["path"], "--overwrite", "--json", "--reason", "once more")
    )
    assert again["taken_at"] == taken["taken_at"]
    other.serve()
    try:
        page = json.loads(other.ok("chat", "history", chat_id, "-u", "alice", "--json"))
        assert [message["content"] for message in page["messages"]] == ["before the backup"]
        assert page["epoch"] > 1, "a restore raises every epoch"
    finally:
        other.stop()


def test_a_person_is_erased_after_being_asked_twice(program: Program) -> None:
    chat_id = program.ok("chat", "create", "-u", "dora", "-n", "diary", "-m", "bob").strip()
    program.ok("chat", "send", chat_id, "dear diary", "-u", "dora")
    asked = program.run("erase", "--user", "dora", "--reason", "ticket 1", stdin="n\n")
    assert asked.returncode == 1 and "Erase everything dora (default) wrote?" in asked.stderr
    assert "dear diary" in program.ok("chat", "history", chat_id, "-u", "bob")
    done = program.ok("erase", "--user", "dora", "--reason", "ticket 1", "--yes")
    assert "1 messages of dora are erased, 1 chats left" in done
    history = program.ok("chat", "history", chat_id, "-u", "bob")
    assert "dear diary" not in history and "(removed)" in history
    again = json.loads(
        program.ok("erase", "--user", "dora", "--reason", "ticket 1", "--yes", "--json")
    )
    assert again == {"messages": 0, "chats_left": 0, "kept": []}


def test_a_file_that_is_no_backup_is_refused(nowhere: Program, tmp_path: Path) -> None:
    bad = tmp_path / "bad.db"
    bad.write_text("this is no database, and long enough to be looked at as one " * 20)
    assert "bad.db" in failed(nowhere.run("restore", str(bad)))
    assert "there is no backup" in failed(nowhere.run("restore", str(tmp_path / "none.db")))


def test_hostile_text_cannot_drive_the_terminal(program: Program, lobby: str) -> None:
    program.ok("chat", "send", lobby, "red \x1b[31m alert \x07", "-u", "bob")
    assert "\x1b" not in program.ok("chat", "history", lobby, "-u", "alice")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_can_complete_commands(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(tmp_path / "state")
    monkeypatch.setenv("_HOLDFAST_COMPLETE", f"source_{shell}")
    assert f"_HOLDFAST_COMPLETE=complete_{shell}" in program.run_process().stdout
    monkeypatch.setenv("_HOLDFAST_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "holdfast chat o")
    monkeypatch.setenv("COMP_CWORD", "2")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "holdfast chat o")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    assert "open" in program.run_process().stdout


# Credentials and the state directory


def test_a_credential_comes_from_a_file_or_the_environment(
    program: Program, nowhere: Program, tmp_path: Path
) -> None:
    file = tmp_path / "admin.key"
    file.write_text(
        json.loads((program.state_dir / "secrets.json").read_text())["admin_key"] + "\n"
    )
    assert "node_id" in nowhere.ok(
        "status", "--json", "--url", program.url, "--token-file", str(file)
    )
    with patched_environment({**nowhere.environment, "HOLDFAST_TOKEN_FILE": str(file)}):
        assert CliRunner().invoke(app, ["status", "--url", program.url]).exit_code == 0
    both = nowhere.run("status", "--token", "x", "--token-file", str(file))
    assert both.returncode == 1 and "not both" in both.stderr
    for text, why in (
        ("", "holds no token"),
        ("two\nlines", "holds no token"),
        (None, "cannot be read"),
    ):
        bad = tmp_path / "bad.key"
        bad.unlink(missing_ok=True)
        if text is not None:
            bad.write_text(text)
        refused = nowhere.run("status", "--token-file", str(bad))
        assert refused.returncode == 1 and why in refused.stderr


def test_a_server_on_an_empty_volume_keeps_its_state_in_a_directory_of_its_own(
    tmp_path: Path,
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    program = Program(volume)
    server = program.serve()
    assert (
        f"others can write to {volume}: everything is in {volume / 'state'}"
        in (tmp_path / "serve.log").read_text()
    )
    assert [path.name for path in volume.iterdir()] == ["state"]
    assert "node_id" in program.ok("status", "--json"), "commands find it with the same option"
    server.terminate()
    server.wait(PATIENCE_SECONDS)
    databases = {"access.db", "chats.db", "limits.db", "replies.db", "webhooks.db", "work.db"}
    others = {"alerts.json", "keys.json", "lock", "name.json", "secrets.json", "work.db-lock"}
    assert {path.name for path in (volume / "state").iterdir()} == databases | others
    (volume / "state").chmod(0o777)
    refused = program.run_process("serve")
    assert refused.returncode != 0 and f"chmod 700 {volume / 'state'}" in refused.stderr


def test_the_help_of_backup_says_which_secrets_are_in_one(program: Program) -> None:
    said = " ".join(program.ok("backup", "--help").split())
    assert "the secrets with which webhooks are signed" in said and "hashes of the API keys" in said
    folder = Path(json.loads(program.ok("backup", "--json"))["path"])
    assert not (folder / "secrets.json").exists()
    assert {"webhooks.db", "keys.json"} <= {path.name for path in folder.iterdir()}
