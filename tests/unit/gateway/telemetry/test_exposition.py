"""The text that Prometheus reads: every family once, with its kind; label values whole, whatever is in them."""

from __future__ import annotations

import pytest
from fakes.scrape import read
from fakes.story import a_record

from gateway.telemetry.exposition import exposition
from gateway.telemetry.families import FAMILIES
from gateway.telemetry.instruments import Instruments


def test_every_family_is_there_with_its_kind() -> None:
    seen = read(exposition(Instruments.alone().shared, {}, "1.0", "rev"))
    assert seen.kinds == {f"poolgate_{family.name}".removesuffix("_total"): family.kind for family in FAMILIES}


def test_a_gateway_that_served_nothing_shows_no_series_of_others() -> None:
    assert "other" not in exposition(Instruments.alone().shared, {}, "1.0", "rev")


@pytest.mark.parametrize("name", ['a "b"', "back\\slash", "two\nlines", "n\\n", "모델 👍", "{le=1}", "a,b"])
def test_a_route_may_have_any_name(name: str) -> None:
    counted = Instruments.alone()
    record = a_record()
    record.route, record.status, record.ending = name, 200, "completed"
    counted.observe(record)
    seen = read(exposition(counted.shared, {}, "1.0", "rev"))
    assert seen.sum("requests_total", route=name) == 1
    assert seen.sum("request_seconds_bucket", route=name, le="+Inf") == 1


def test_a_large_total_keeps_its_last_digit() -> None:
    counted = Instruments.alone()
    record = a_record()
    record.prompt_tokens = 2**53 - 1
    counted.observe(record)
    text = exposition(counted.shared, {}, "1.0", "rev")
    assert f" {2**53 - 1}\n" in text


def test_replicas_release_and_revision_are_told() -> None:
    seen = read(
        exposition(Instruments.alone().shared, {("a", "ready"): 2, ("a", "failed"): 1}, "1.2.3", "0123456789ab")
    )
    assert (seen.sum("replicas", pool="a", state="ready"), seen.sum("replicas", pool="a")) == (2, 3)
    assert seen.sum("build_info", version="1.2.3", revision="0123456789ab") == 1


def test_the_buckets_of_each_histogram_rise() -> None:
    for family in FAMILIES:
        assert list(family.bounds) == sorted(set(family.bounds))
        assert bool(family.bounds) == (family.kind == "histogram")
