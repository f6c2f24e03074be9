"""The config under overload: the gateway takes it, and every caller has a user and a class in it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from bench.overload.arrivals import CALLERS
from bench.overload.gateway import ROUTE, config_text
from gateway.config.load import load


def test_the_gateway_takes_the_config(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(config_text(20_001, tmp_path, tmp_path / "redis.sock", [20_002, 20_003]))
    config = load(path).config
    assert config.pools["bench"].urls == ["http://127.0.0.1:20002", "http://127.0.0.1:20003"]
    assert list(config.routes) == [ROUTE]


def test_every_caller_has_a_user_of_its_own_and_a_class() -> None:
    text = tomllib.loads(config_text(1, Path("/f"), Path("/s"), [2]))
    assert set(text["users"]) == {caller.name for caller in CALLERS}
    assert set(text["classes"]) == {caller.class_name for caller in CALLERS}
    assert text["classes"]["interactive"]["priority"] < text["classes"]["batch"]["priority"]
