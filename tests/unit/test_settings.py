"""Settings: where they come from, what is refused, and the blocks of document 000."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.errors import BadSetting
from holdfast.limits.entry_rules import DEFAULT_RULES
from holdfast.settings import REMOVED, Settings, differences, load, paths

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_configured_is_safe_and_all_defaults() -> None:
    settings = load(None, {}, {})
    assert settings == Settings()
    assert settings.server.host == "127.0.0.1"
    assert list(differences(settings)) == []


def test_the_later_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text(
        "[server]\nport = 1000\nhost = '::1'\n[gateway.timeouts]\nheartbeat_interval_seconds = 7\n"
    )
    settings = load(
        file, {"HOLDFAST_PORT": "2000", "HOLDFAST_SERVER__NODE_ID": "n1"}, {"server.node_id": "n2"}
    )
    assert settings.server.host == "::1"
    assert settings.server.port == 2000
    assert settings.server.node_id == "n2"
    assert settings.gateway.timeouts.heartbeat_interval_seconds == 7


@pytest.mark.covers("000 no silent tuning")
def test_what_differs_from_its_default_is_listed() -> None:
    settings = load(None, {"HOLDFAST_GATEWAY__CIRCUIT_BREAKER__MIN_FAILURE_RATIO": "0"}, {})
    assert list(differences(settings)) == [("gateway.circuit_breaker.min_failure_ratio", 0.0, 0.5)]


def test_the_variables_of_a_kubernetes_service_with_our_name_are_not_settings() -> None:
    links = {
        "HOLDFAST_SERVICE_HOST": "10.0.0.7",
        "HOLDFAST_SERVICE_PORT": "8080",
        "HOLDFAST_SERVICE_PORT_HTTP": "8080",
        "HOLDFAST_PORT": "tcp://10.0.0.7:8080",
        "HOLDFAST_PORT_8080_TCP": "tcp://10.0.0.7:8080",
        "HOLDFAST_PORT_8080_TCP_PROTO": "tcp",
        "HOLDFAST_PORT_8080_TCP_PORT": "8080",
        "HOLDFAST_PORT_8080_TCP_ADDR": "10.0.0.7",
    }
    assert load(None, links, {}) == Settings()
    with pytest.raises(BadSetting, match="service_hosts"):
        load(None, {"HOLDFAST_SERVICE_HOSTS": "10.0.0.7"}, {})


def test_lists_in_the_environment_are_separated_by_commas() -> None:
    settings = load(None, {"HOLDFAST_SERVER__TRUSTED_PROXIES": "10.0.0.1, 192.168.0.0/16"}, {})
    assert settings.server.trusted_proxies == ("10.0.0.1", "192.168.0.0/16")


@pytest.mark.parametrize(
    ("environ", "overrides", "named"),
    [
        ({"HOLDFAST_PROT": "1"}, {}, "HOLDFAST_PROT"),
        ({"HOLDFAST_GATEWAY__TIMEOUT__X": "1"}, {}, "gateway.timeout.x"),
        ({"HOLDFAST_GATEWAY": "1"}, {}, "group of settings"),
        ({"HOLDFAST_PORT": "eighty"}, {}, "server.port"),
        ({"HOLDFAST_PORT": "70000"}, {}, "between 0 and 65535"),
        ({}, {"gateway.backpressure.inbound.max_queue_depth": 0}, "max_queue_depth"),
        (
            {},
            {"gateway.backpressure.outbound.warning_threshold_percent": 99},
            "warning_threshold_percent",
        ),
        ({}, {"gateway.circuit_breaker.min_failure_ratio": 2}, "min_failure_ratio"),
        ({}, {"server.allowed_origins": "*"}, "exact"),
        ({}, {"server.trusted_proxies": "nonsense"}, "nonsense"),
        ({}, {"server.node_id": "two words"}, "node_id must be printable ASCII without spaces"),
        (
            {},
            {"server.log_level": "loud"},
            "server.log_level must be one of debug, error, info, warning",
        ),
        ({}, {"api.body_bytes_max": "1.5"}, "api.body_bytes_max must be a whole number, not text"),
        (
            {},
            {"gateway.timeouts.heartbeat_interval_seconds": "nan"},
            "must be a number, not nan",
        ),
        (
            {},
            {"durability.keys.answers_ttl_days": "inf"},
            "durability.keys.answers_ttl_days must be a number, not inf",
        ),
        ({}, {"durability.changes.max_at_once": 0}, "max_at_once must be greater than 0"),
        (
            {},
            {"durability.intake.hot_messages_per_minute": 0},
            "hot_messages_per_minute must be greater than 0",
        ),
        ({}, {"durability.sqlite.cache_bytes": -5}, "cache_bytes must be greater than 0"),
        (
            {},
            {"durability.sqlite.readers": 10**9},
            "durability.sqlite: readers must be at most 64, not 1000000000",
        ),
        (
            {},
            {"durability.sqlite.checkpoint_pages": 10**18},
            "checkpoint_pages must be at most 1000000",
        ),
        (
            {},
            {"durability.sqlite.cache_bytes": 10**18},
            "cache_bytes must be at most 1099511627776",
        ),
        (
            {},
            {"durability.sqlite.busy_timeout_seconds": 10**18},
            "busy_timeout_seconds must be at most 60",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(
    environ: dict[str, str], overrides: dict[str, object], named: str
) -> None:
    with pytest.raises(BadSetting, match=re.escape(named)):
        load(None, environ, overrides)


@pytest.mark.parametrize("path", REMOVED)
def test_a_setting_that_a_rule_replaced_stops_the_start_and_names_the_rule(
    tmp_path: Path, path: str
) -> None:
    group, name = path.split(".")
    file = tmp_path / "holdfast.toml"
    file.write_text(f"[{group}]\n{name} = 5\n")
    sources = (
        (file, {}, {}),
        (None, {f"HOLDFAST_{group}__{name}".upper(): "5"}, {}),
        (None, {}, {path: 5}),
    )
    for source, environ, overrides in sources:
        with pytest.raises(
            BadSetting, match=rf'{path} was removed.*rules set "\*" {REMOVED[path]} limit='
        ):
            load(source, environ, overrides)
    assert REMOVED[path] in {rule.resource for rule in DEFAULT_RULES}


def test_public_address_without_a_declared_proxy_is_refused_with_the_remedy() -> None:
    with pytest.raises(BadSetting, match=r"server\.trusted_proxies"):
        load(None, {}, {"server.host": "0.0.0.0"})
    assert (
        load(None, {}, {"server.host": "0.0.0.0", "server.trusted_proxies": "10.0.0.1"}).server.host
        == "0.0.0.0"
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "[server", "not valid toml"),
        ("a.yaml", "server: [", "not valid yaml"),
        ("a.yaml", "- 1", "table of settings"),
        ("a.yaml", "gateway: {nonsense: 1}", "nonsense"),
        ("a.toml", "[server]\nport = 'x'", "server.port must be a whole number, not text"),
        ("a.toml", "port = '\udcff'", "not text in UTF-8"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(BadSetting, match=said):
        load(tmp_path / name, {}, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"gone\.toml"):
        load(tmp_path / "gone.toml", {}, {})


DESIGN_BLOCKS = """
gateway:
  backpressure:
    inbound:
      rate_limit_per_second: 10
      rate_limit_burst: 20
      max_queue_depth: 100
      max_message_size_bytes: 4096
    outbound:
      max_buffer_messages: 1000
      warning_threshold_percent: 80
      critical_threshold_percent: 95
      grace_period_seconds: 5

  circuit_breaker:
    failure_threshold: 5
    failure_window_seconds: 30
    open_duration_seconds: 30
    half_open_probe_count: 1

  timeouts:
    durability_rpc_seconds: 5
    heartbeat_interval_seconds: 30
    heartbeat_timeout_seconds: 10

  shutdown:
    drain_timeout_seconds: 30

durability:
  dynamodb:
    retry:
      max_attempts: 3
      initial_backoff_ms: 100
      max_backoff_ms: 5000
    transaction_conflict:
      max_attempts: 5
      jitter_ms: 50

  kafka:
    producer:
      acks: "all"
      timeout_ms: 10000
      retries: 3
      retry_backoff_ms: 100

fanout:
  kafka:
    consumer:
      group_id: "fanout-workers"
      max_poll_records: 500
      enable_auto_commit: false

  retry:
    max_attempts: 3
    initial_backoff_ms: 100
    max_backoff_ms: 1000

  dlq:
    topic: "dead_letters.messages"
    alert_threshold_per_hour: 100
"""
"""The three configuration blocks of the failure-handling design document, as written
there."""


ABSENT_IN_BLOCKS = [
    "durability.dynamodb.retry.max_attempts",
    "durability.dynamodb.retry.initial_backoff_ms",
    "durability.dynamodb.retry.max_backoff_ms",
    "durability.dynamodb.transaction_conflict.max_attempts",
    "durability.dynamodb.transaction_conflict.jitter_ms",
    "durability.kafka.producer.acks",
    "durability.kafka.producer.timeout_ms",
    "durability.kafka.producer.retries",
    "durability.kafka.producer.retry_backoff_ms",
    "fanout.kafka.consumer.group_id",
    "fanout.kafka.consumer.enable_auto_commit",
    "fanout.dlq.topic",
]
"""What the blocks set of engines that this version does not have."""


@pytest.mark.covers("000 `gateway.circuit_breaker.failure_threshold`")
def test_design_document_blocks_are_refused_only_for_absent_engines(tmp_path: Path) -> None:
    """Each refusal names the setting; the other values are the defaults."""
    tree, refused = yaml.safe_load(DESIGN_BLOCKS), []
    while True:
        (tmp_path / "blocks.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        try:
            settings = load(tmp_path / "blocks.yaml", {}, {})
            break
        except BadSetting as error:
            found = re.search(
                r"([a-z_.]+) is a setting of an engine this version does not have", str(error)
            )
            assert found, error
            refused.append(found[1])
            *groups, leaf = found[1].split(".")
            group = tree
            for name in groups:
                group = group[name]
            del group[leaf]
            tree = without_empty_groups(tree)
    assert refused == ABSENT_IN_BLOCKS
    assert list(differences(settings)) == []


def without_empty_groups(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    slim = {name: without_empty_groups(value) for name, value in tree.items()}
    return {name: value for name, value in slim.items() if value != {}}


@pytest.mark.parametrize("path", ABSENT_IN_BLOCKS)
def test_setting_of_an_absent_engine_is_refused_from_every_source(path: str) -> None:
    variable = f"HOLDFAST_{path.upper().replace('.', '__')}"
    for environ, overrides in (({variable: "1"}, {}), ({}, {path: 1})):
        with pytest.raises(BadSetting, match=f"{path} is a setting of an engine"):
            load(None, environ, overrides)


OLD, NEW = "fanout.kafka.consumer.max_poll_records", "fanout.read_entries_max"


@pytest.mark.covers("000 `fanout.kafka.consumer.max_poll_records`")
def test_alias_sets_its_new_path_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[fanout.kafka.consumer]\nmax_poll_records = 7\n")
    variable = {"HOLDFAST_FANOUT__KAFKA__CONSUMER__MAX_POLL_RECORDS": "7"}
    for given in ((file, {}, {}), (None, variable, {}), (None, {}, {OLD: 7})):
        settings = load(*given)  # type: ignore[arg-type]
        assert [(path, value) for path, value, _ in differences(settings)] == [(NEW, 7)]


def test_alias_and_new_path_may_be_set_only_alike(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[fanout.kafka.consumer]\nmax_poll_records = 7\n")
    assert load(file, {}, {NEW: 7}).fanout.read_entries_max == 7
    for overrides in ({NEW: 8}, {NEW: "8"}):
        with pytest.raises(BadSetting, match=rf"{OLD} is the old name of {NEW}, and both are set"):
            load(file, {}, overrides)


def test_every_setting_has_a_default_of_its_own_kind() -> None:
    found = dict(paths())
    assert len(found) > 100
    assert found["gateway.backpressure.outbound.max_buffer_messages"] == 1000


def test_nobody_may_be_in_more_chats_than_a_resume_takes() -> None:
    with pytest.raises(BadSetting, match="resume_chats_max must not be below"):
        load(None, {}, {"durability.chats.chats_per_user_max": 20_000})
    raised = {
        "durability.chats.chats_per_user_max": 20_000,
        "gateway.pages.resume_chats_max": 20_000,
    }
    assert load(None, {}, raised).gateway.pages.resume_chats_max == 20_000


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"gateway.backpressure.inbound.max_message_size_bytes": 65_536}, "max_frame_bytes"),
        ({"gateway.backpressure.inbound.max_frame_bytes": 4_096}, "max_frame_bytes"),
        (
            {
                "gateway.backpressure.inbound.max_message_size_bytes": 100_000,
                "gateway.backpressure.inbound.max_frame_bytes": 200_000,
            },
            "api.body_bytes_max",
        ),
    ],
)
def test_settings_that_break_each_other_are_refused(
    overrides: dict[str, object], named: str
) -> None:
    with pytest.raises(BadSetting, match=named):
        load(None, {}, overrides)


def test_redis_of_the_cluster_is_everywhere_unless_a_part_has_its_own() -> None:
    ours, own = "redis://localhost:1/0", "rediss://b:1/0"
    shared = load(None, {}, {"cluster.redis": ours})
    assert (shared.limits.counters_url, shared.streaming.replies_url) == (ours, ours)
    apart = {"limits.counters_url": "memory:", "streaming.replies_url": own}
    settings = load(None, {}, {"cluster.redis": ours, **apart})
    assert (settings.limits.counters_url, settings.streaming.replies_url) == ("memory:", own)


SECRET = {"access.tokens.secret_file": "/etc/holdfast/tokens"}
CLUSTER = {"cluster.postgres": "postgresql:///x", **SECRET}


def test_postgres_of_the_cluster_is_everywhere_unless_a_part_has_its_own() -> None:
    ours = "postgresql://127.0.0.1/holdfast"
    shared = load(None, {}, {"cluster.postgres": ours, **SECRET})
    assert (shared.limits.rules_url, shared.work.url) == (ours, ours)
    own = "postgresql://127.0.0.2/holdfast?sslmode=disable"
    apart = {"limits.rules_url": own, "work.url": own}
    settings = load(None, {}, {"cluster.postgres": ours, **SECRET, **apart})
    assert (settings.limits.rules_url, settings.work.url) == (own, own)


@pytest.mark.parametrize("name", ["work.url", "limits.rules_url"])
def test_cluster_whose_jobs_or_rules_are_a_file_of_one_node_is_refused(name: str) -> None:
    with pytest.raises(BadSetting, match=f"{name} is a file of one node.*leave {name} out"):
        load(None, {}, {"cluster.postgres": "postgresql:///x", **SECRET, name: "sqlite:"})
    load(None, {}, {name: "sqlite:"})


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ("", "roles names none: the roles are gateway"),
        ("gateway,ingest,relay", "the role relay comes with Kafka"),
        ("fanout", "the role fanout comes with Kafka"),
        ("cook", "there is no role cook"),
        ("work,work", "the role work is named twice"),
        ("gateway,admin", "the role gateway needs ingest"),
    ],
)
def test_roles_that_a_node_cannot_have_are_refused(roles: str, said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        load(None, {"HOLDFAST_SERVER__ROLES": roles}, CLUSTER)


def test_roles_are_for_nodes_of_a_cluster() -> None:
    assert load(None, {}, {**CLUSTER, "server.roles": "work"}).server.roles == ("work",)
    with pytest.raises(BadSetting, match="a node that is alone has every role"):
        load(None, {}, {"server.roles": "work"})


@pytest.mark.parametrize("name", ["cluster.redis", "limits.counters_url", "streaming.replies_url"])
@pytest.mark.parametrize(
    "url", ["redis://:S3CRET@cache/0", "redis+sentinel://:S3CRET@127.0.0.1:1,cache/service"]
)
def test_redis_on_another_machine_is_encrypted_or_the_url_says_that_it_is_not(
    name: str, url: str
) -> None:
    with pytest.raises(BadSetting, match="in clear text: use rediss://") as refused:
        load(None, {}, {name: url})
    assert "S3CRET" not in str(refused.value)
    load(None, {}, {name: f"{url}?sslmode=disable"})
    load(None, {}, {name: url.replace("redis", "rediss", 1)})
    with pytest.raises(BadSetting, match="can only be disable"):
        load(None, {}, {name: f"{url}?sslmode=prefer"})


@pytest.mark.parametrize("name", ["limits.rules_url", "work.url"])
def test_every_postgres_on_another_machine_says_how_it_is_encrypted(name: str) -> None:
    with pytest.raises(BadSetting, match=r"another machine \(db\)"):
        load(None, {}, {name: "postgresql://db/x"})
    load(None, {}, {name: "postgresql://db/x?sslmode=verify-full"})


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://127.0.0.1/x", "must begin with postgresql://"),
        ("postgresql://ann:S3CRET@db.example/x", r"another machine \(db.example\)"),
        ("postgresql://ann:S3CRET@127.0.0.1,db2:5433/x", r"another machine \(db2\)"),
        ("postgresql:///x?host=db3&password=S3CRET", r"another machine \(db3\)"),
        ("postgresql://[2001:db8::1]:5432/x", r"another machine \(2001:db8::1\)"),
        ("postgresql://:S3CRET#more@localhost/x", "are written as %XX"),
        ("postgresql://[::1]:S3CRET/x", "are written as %XX"),
    ],
)
def test_bad_url_of_the_cluster_is_refused_without_its_password(url: str, said: str) -> None:
    with pytest.raises(BadSetting, match=said) as refused:
        load(None, {}, {"cluster.postgres": url, **SECRET})
    assert "S3CRET" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:///x",
        "postgresql://localhost/x",
        "postgres://ann@[::1]:5432/x",
        "postgresql:///x?host=/run/postgresql",
        "postgresql://db.example/x?sslmode=verify-full",
        "postgresql://db.example/x?sslmode=disable",
    ],
)
def test_url_of_the_cluster_is_local_or_says_how_it_is_encrypted(url: str) -> None:
    assert load(None, {}, {"cluster.postgres": url, **SECRET}).cluster.postgres == url


def test_cluster_needs_the_same_token_keys_on_every_node() -> None:
    with pytest.raises(BadSetting, match="the same token keys"):
        load(None, {}, {"cluster.postgres": "postgresql:///x"})


def test_lossless_failover_is_about_postgres() -> None:
    with pytest.raises(BadSetting, match="which is not set"):
        load(None, {}, {"cluster.failover": "lossless"})
