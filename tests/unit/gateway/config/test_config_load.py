"""The file and the environment become one checked config with a revision; secrets stay out of every message."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.config_lines import HASH, PATH, faults, loads, sound

from gateway.config.faults import key_path
from gateway.config.load import load, metrics_key, parse, read_key_env
from gateway.domain.errors import ConfigError

CANARY = "canary-7c1f"
TOML = """
[pools.a]
model = "./m"
[routes.chat]
targets = [{ pool = "a" }]
"""


def test_a_file_is_loaded_and_knows_where_it_lies(tmp_path):
    (tmp_path / "config.toml").write_text(TOML)
    loaded = load(tmp_path / "config.toml")
    assert loaded.path == tmp_path / "config.toml"
    assert loaded.directory == tmp_path
    assert loaded.state_dir == tmp_path / ".poolgate"


def test_paths_with_a_slash_are_relative_to_the_file():
    loaded = parse(sound(gateway={"state_dir": "/var/lib/x"}), PATH)
    assert loaded.resolve("bin/vllm") == "/etc/poolgate/bin/vllm"
    assert loaded.resolve("/opt/vllm") == "/opt/vllm"
    assert loaded.resolve("vllm") == "vllm"
    assert loaded.resolve("~/vllm") == str(Path("~/vllm").expanduser())
    assert loaded.state_dir == Path("/var/lib/x")


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"[gateway", "is not TOML"),
        (b"\xff", "is not TOML"),
        (b"a = 1\na = 2", "is not TOML"),
        (None, "cannot be read"),
    ],
    ids=["cut", "not UTF-8", "key twice", "no file"],
)
def test_a_file_that_cannot_be_read_is_named_with_the_way_out(tmp_path, content, fact):
    path = tmp_path / "config.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(path)
    (line,) = caught.value.findings
    assert line.startswith(f"{path}: {fact}")
    assert "; " in line


def test_an_empty_file_says_what_it_lacks(tmp_path):
    (tmp_path / "config.toml").touch()
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "config.toml")
    assert caught.value.findings == ["pools: is missing; add it", "routes: is missing; add it"]


@pytest.mark.parametrize(
    ("loc", "path"),
    [
        (("gateway", "port"), "gateway.port"),
        (("pools", "a", "replicas", 0, "gpus"), "pools.a.replicas[0].gpus"),
        (("pools", "a", "replicas", 0, "gpus", 1, "int"), "pools.a.replicas[0].gpus[1]"),
        (("pools", "a", "vllm_args", "x", "dict[str,any]"), "pools.a.vllm_args.x"),
        (("pools", "a b", "[key]"), "pools.a b (its name)"),
        (("str",), "str"),
        ((), "(top level)"),
    ],
)
def test_key_paths_are_written_as_in_the_file(loc, path):
    assert key_path(loc) == path


# --- environment ------------------------------------------------------------------------------------------------------


def test_a_variable_overrides_one_value_and_leaves_its_neighbours(monkeypatch):
    monkeypatch.setenv("POOLGATE_GATEWAY__PORT", "9001")
    monkeypatch.setenv("POOLGATE_GATEWAY__TIMEOUTS__GAP_S", "3")
    monkeypatch.setenv("POOLGATE_KEYS__K__MODELS", '["chat"]')
    document = sound(gateway={"port": 1, "host": "::1", "timeouts": {"body_s": 7}}, keys={"k": {"sha256": HASH}})
    gateway = loads(document).config.gateway
    assert (gateway.port, gateway.host, gateway.timeouts.gap_s, gateway.timeouts.body_s) == (9001, "::1", 3, 7)
    assert loads(document).config.keys["k"].models == ["chat"]


def test_a_variable_is_checked_as_the_file_is(monkeypatch):
    monkeypatch.setenv("POOLGATE_GATEWAY__PORT", CANARY)
    assert faults(sound()) == ["gateway.port: must be a whole number"]
    monkeypatch.setenv("POOLGATE_GATEWAY__PORT", "80")
    monkeypatch.setenv("POOLGATE_GATEWAY__PROT", "80")
    assert faults(sound())[0].startswith("gateway.prot: unknown key")


@pytest.mark.parametrize(
    ("variable", "section"), [("POOLGATE_GATEWAY", "gateway"), ("POOLGATE_KEYS__K__MODELS", "keys")]
)
def test_a_variable_that_should_be_json_is_a_config_error_not_a_traceback(monkeypatch, variable, section):
    monkeypatch.setenv(variable, CANARY)
    (line,) = faults(sound(keys={"k": {"sha256": HASH}}))
    assert line.startswith(f"{section}: an environment variable POOLGATE_{section.upper()}… is not JSON")
    assert '["a", "b"]' in line and CANARY not in line


def test_variables_of_ours_that_are_no_keys_are_left_alone(monkeypatch):
    monkeypatch.setenv("POOLGATE_CONFIG_FILE", "x")
    loads(sound())


def test_blanks_around_a_key_from_a_secret_file_are_dropped(monkeypatch):
    monkeypatch.setenv("K", " sk-1\n")
    assert read_key_env("K") == "sk-1"
    monkeypatch.setenv("K", " \n")
    assert read_key_env("K") is None
    monkeypatch.delenv("K")
    assert read_key_env("K") is None


# --- secrets (B052: start-up prints the master key) -------------------------------------------------------------------


@pytest.mark.parametrize(
    "document",
    [
        sound(redis={"url": f"http://:{CANARY}@host"}),
        sound(redis={"url": f"redis://:{CANARY}@host", "on_outage": CANARY}),
        sound(keys={"k": {"key_env": f"sk-{CANARY}"}}),
        sound(keys={"k": {"sha256": CANARY}}),
        sound(keys={"k": {"key": CANARY}}),
        sound(keys={"k": {"key_env": "K", "sha256": CANARY}}),
        sound(workers={"env": {"HF_TOKEN": CANARY}, "stop_s": 0}),
        sound(workers={"env": {"HF_TOKEN": [CANARY]}}),
        sound(pools={"a": {"model": "m", "vllm_args": {"api_key": CANARY}}}),
        sound(pools={"a": {"urls": [f"https://user:{CANARY}@host"]}}),
    ],
    ids=[
        "redis scheme",
        "redis neighbour",
        "key in place of a name",
        "key in place of a hash",
        "key in clear",
        "both",
        "token beside a fault",
        "token of a wrong kind",
        "engine key",
        "url with a password",
    ],
)
def test_startup_prints_the_master_key_never_in_a_validation_error(document):
    with pytest.raises(ConfigError) as caught:
        parse(document, PATH)
    told = [*caught.value.findings, str(caught.value), repr(caught.value), str(caught.value.__cause__)]
    assert not any(CANARY in text for text in told)


def test_startup_prints_the_master_key_never_when_settings_are_dumped():
    loaded = loads(sound(redis={"url": f"redis://:{CANARY}@host"}))
    assert CANARY not in repr(loaded) + str(loaded.config) + loaded.config.model_dump_json()


# --- revision ---------------------------------------------------------------------------------------------------------


def test_a_revision_is_twelve_hex_digits_and_depends_on_content_alone(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "b.toml").write_text('# the same\nroutes.chat.targets = [{ pool = "a" }]\n[pools]\na.model = "./m"\n')
    first, second = load(tmp_path / "a.toml").revision, load(tmp_path / "b.toml").revision
    assert first == second
    assert len(first) == 12 and set(first) <= set("0123456789abcdef")


def test_a_default_that_is_written_out_does_not_change_the_revision():
    assert loads(sound(gateway={"port": 8080})).revision == loads(sound()).revision


@pytest.mark.parametrize(
    "change",
    [
        {"gateway": {"port": 8081}},
        {"gateway": {"timeouts": {"gap_s": 61}}},
        {"redis": {"url": "redis://host:6380"}},
        {"keys": {"k": {"sha256": HASH}}},
        {"routes": {"chat": {"targets": [{"pool": "a", "weight": 2}]}}},
        {"pools": {"a": {"model": "org/name", "vllm_args": {"x": 1}}}},
    ],
)
def test_any_change_changes_the_revision(change, monkeypatch):
    assert loads(sound(**change)).revision != loads(sound()).revision


def test_revision_gives_no_hint_of_the_redis_password(monkeypatch):
    one, two = (loads(sound(redis={"url": f"redis://:{word}@host"})).revision for word in ("one", "two"))
    assert one == two


def test_the_environment_changes_the_revision_as_the_file_would(monkeypatch):
    from_file = loads(sound(gateway={"port": 9001})).revision
    monkeypatch.setenv("POOLGATE_GATEWAY__PORT", "9001")
    assert loads(sound()).revision == from_file


def test_metrics_ask_for_no_key_unless_one_is_named(monkeypatch):
    assert metrics_key(loads(sound()).config) is None
    monkeypatch.setenv("SCRAPE", " secret\n")
    assert metrics_key(loads(sound(metrics={"key_env": "SCRAPE"})).config) == "secret"


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_named_key_for_metrics_that_is_not_set_is_a_fault_with_a_way_out(monkeypatch, value):
    monkeypatch.delenv("SCRAPE", raising=False)
    if value is not None:
        monkeypatch.setenv("SCRAPE", value)
    with pytest.raises(ConfigError) as raised:
        metrics_key(loads(sound(metrics={"key_env": "SCRAPE"})).config)
    (line,) = raised.value.findings
    assert line.startswith("metrics.key_env: ") and "SCRAPE is not set; set it" in line
