"""RouteTable and routes_of: names and aliases, who may use what, and what a config's route becomes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.story import ALICE, a_config

from gateway.domain.errors import NotAllowed, UnknownModel
from gateway.domain.media import MediaTokens
from gateway.domain.request import NO_LIMITS, Limits
from gateway.domain.route import Target
from gateway.routing.table import RouteTable, routes_of

CONFIG = a_config(
    pools={"a": {"urls": ["http://a"]}, "b": {"urls": ["http://b"]}},
    classes={"default": {}, "batch": {"priority": 10}},
    routes={
        "chat": {
            "aliases": ["gpt-4o", "org/model:7b"],
            "targets": [{"pool": "a", "weight": 3}, {"pool": "b"}],
            "max_output_tokens": 100,
            "on_max_output": "refuse",
            "defaults": {"temperature": 0.5},
            "limits": {"in_flight": 4},
            "by_class": {"batch": {"targets": [{"pool": "b"}], "fallback": ["a"]}},
        },
        "small": {"targets": [{"pool": "b"}], "fallback": ["a"]},
    },
).config
TABLE = RouteTable(routes_of(CONFIG))


@pytest.mark.parametrize("name", ["chat", "gpt-4o", "org/model:7b"])
def test_a_name_and_its_aliases_are_one_route(name: str) -> None:
    assert TABLE.resolve(name, ALICE).name == "chat"


@pytest.mark.parametrize("name", ["Chat", "chat ", "a", "gpt", "*", "../chat"])
def test_any_other_name_is_unknown(name: str) -> None:
    assert TABLE.find(name) is None
    with pytest.raises(UnknownModel, match="does not exist") as caught:
        TABLE.resolve(name, ALICE)
    assert caught.value.param == "model"


def test_a_key_uses_only_the_routes_on_its_list_by_whatever_name() -> None:
    bob = replace(ALICE, models=("small",))
    assert TABLE.resolve("small", bob).name == "small"
    for name in ("chat", "gpt-4o"):
        with pytest.raises(NotAllowed, match=name):
            TABLE.resolve(name, bob)
    assert [route.name for route in TABLE.visible_to(bob)] == ["small"]
    assert [route.name for route in TABLE.visible_to(ALICE)] == ["chat", "small"]
    assert TABLE.visible_to(replace(ALICE, models=())) == []


def test_an_unknown_name_of_a_megabyte_does_not_come_back_in_the_error() -> None:
    with pytest.raises(UnknownModel) as caught:
        TABLE.resolve("x" * 1_000_000, ALICE)
    assert len(caught.value.message) < 300


def test_a_route_is_what_its_section_says() -> None:
    chat, small = TABLE.routes
    assert (chat.order.targets, chat.order.fallback) == ((Target("a", 3.0), Target("b", 1.0)), ())
    batch = chat.order_for("batch")
    assert (batch.targets, batch.fallback) == ((Target("b"),), ("a",))
    assert chat.order_for("batch") is batch, "one object for all requests: it is a key of what is worked out for it"
    assert chat.order_for("default") is chat.order
    assert (chat.max_output_tokens, chat.clamp_output, chat.defaults) == (100, False, {"temperature": 0.5})
    assert chat.limits == Limits(in_flight=4)
    assert (small.max_output_tokens, small.clamp_output, small.defaults, small.limits) == (None, True, {}, NO_LIMITS)
    assert small.order.pools() == ("b", "a")


def test_a_route_reserves_for_media_what_the_pool_takes_that_takes_most() -> None:
    pools = {"a": {"urls": ["http://a"], "image_tokens": 576}, "b": {"urls": ["http://b"], "audio_tokens": 1500}}
    routes = {
        "a": {"targets": [{"pool": "a"}]},
        "both": {"targets": [{"pool": "a"}], "fallback": ["b"]},
        "by-class": {"targets": [{"pool": "a"}], "by_class": {"default": {"targets": [{"pool": "b"}]}}},
    }
    made = {route.name: route.media_tokens for route in routes_of(a_config(pools=pools, routes=routes).config)}
    assert made["a"] == MediaTokens(image=576)
    assert made["both"] == made["by-class"] == MediaTokens(audio=1500)
