"""The config under overload: the gateway takes it, and every caller has a user and a class in it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from bench.overload.arrivals import CALLERS
from bench.overload.capacity import SLOTS
from bench.overload.gateway import ROUTE, config_text
from bench.overload.rounds import Sizes
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


def test_an_engine_gets_no_more_than_it_serves_and_nobody_waits_longer_than_he_has_patience() -> None:
    text = tomllib.loads(config_text(1, Path("/f"), Path("/s"), [2]))
    assert text["pools"]["bench"]["max_in_flight"] == SLOTS
    assert all(each["queue_s"] < Sizes().patience_s for each in text["classes"].values())
