"""Keys in the environment and authorities in files: found, or told with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import certifi
import pytest
from fakes.config_lines import sound

from gateway.config.load import LoadedConfig, parse
from gateway.config.outside import check_outside, engine_keys, outside_faults, own_authorities
from gateway.domain.errors import ConfigError

CANARY = "sk-canary-7c1f"


def loaded(folder: Path, **keys: Any) -> LoadedConfig:
    cloud = {"urls": ["https://h/v1", "https://g"], **keys}
    return parse(sound(pools={"a": {"model": "org/name"}, "cloud": cloud}), folder / "config.toml")


def test_a_pool_that_wants_nothing_has_no_fault(tmp_path: Path) -> None:
    check_outside(loaded(tmp_path))
    assert engine_keys(loaded(tmp_path).config) == {}
    assert own_authorities(loaded(tmp_path)) == {}


def test_the_key_of_a_pool_comes_from_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUD_KEY", f" {CANARY}\n")
    config = loaded(tmp_path, key_env="CLOUD_KEY")
    check_outside(config)
    assert engine_keys(config.config) == {"cloud": CANARY}
    assert CANARY not in repr(config) and CANARY not in config.revision


@pytest.mark.parametrize("value", [None, "", "  "])
def test_an_unset_variable_is_told_with_its_key_path_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("CLOUD_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("CLOUD_KEY", value)
    with pytest.raises(ConfigError) as caught:
        check_outside(loaded(tmp_path, key_env="CLOUD_KEY"))
    assert caught.value.findings == [
        "pools.cloud.key_env: environment variable CLOUD_KEY is not set: those servers would refuse every request; "
        "set it where the gateway starts, or remove key_env if they want no key"
    ]


@pytest.mark.parametrize("key", [f"{CANARY}\r\nx-evil: 1", f"{CANARY}é", f"{CANARY}\x7f"])
def test_a_key_that_no_header_can_carry_is_told_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("CLOUD_KEY", key)
    ((path, fact, way_out),) = outside_faults(loaded(tmp_path, key_env="CLOUD_KEY"))
    assert (path, CANARY in fact + way_out) == ("pools.cloud.key_env", False)
    assert "characters that no key has" in fact


def test_an_authority_is_found_beside_the_config_and_belongs_to_every_url(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls/ca.pem").write_bytes(Path(certifi.where()).read_bytes())
    config = loaded(tmp_path, tls_ca="tls/ca.pem")
    check_outside(config)
    assert own_authorities(config) == {"https://h": tmp_path / "tls/ca.pem", "https://g": tmp_path / "tls/ca.pem"}


@pytest.mark.parametrize(
    ("content", "fact"),
    [(None, "cannot be read (No such file or directory)"), ("x", "holds no certificate in PEM form")],
)
def test_an_authority_that_cannot_be_used_is_told(tmp_path: Path, content: str | None, fact: str) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    ((path, told, way_out),) = outside_faults(loaded(tmp_path, tls_ca="ca.pem"))
    assert (path, told) == ("pools.cloud.tls_ca", fact)
    assert "PEM" in way_out
