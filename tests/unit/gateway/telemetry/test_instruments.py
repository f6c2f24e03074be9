"""What a request counts as: totals, histograms, errors and retries; and where it counts past every bound."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.scrape import Scrape, read
from fakes.story import a_record

from gateway.domain.record import AccessRecord
from gateway.telemetry import instruments
from gateway.telemetry.exposition import exposition
from gateway.telemetry.instruments import Instruments
from gateway.telemetry.shared_values import SharedValues


def ended(**fields: Any) -> AccessRecord:
    """A streamed request that completed: 7 tokens in, 5 out, first byte after 0.2 s, all of it after 1 s."""
    record = a_record()
    record.key_id, record.user, record.model = "alice-dev", "alice", "gpt-4o-mini"
    record.route, record.pool, record.class_name, record.replica = "chat", "a", "default", "a/0@h"
    record.status, record.ending, record.stream, record.attempts = 200, "completed", True, 1
    record.prompt_tokens, record.completion_tokens = 7, 5
    record.admit_s, record.ttft_s, record.total_s = 0.001, 0.2, 1.0
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def counting(shared: SharedValues | None = None, number: int = 0) -> Instruments:
    shared = shared or SharedValues(1)
    return Instruments(shared, shared.slots[number])


def scrape(of: Instruments) -> Scrape:
    return read(exposition(of.shared, {}, "1.0", "rev"))


def test_requests_count_by_route_pool_class_status_and_ending() -> None:
    counted = counting()
    for _ in range(3):
        counted.observe(ended())
    counted.observe(ended(pool="b"))
    counted.observe(ended(status=503, ending="refused", pool=None))
    seen = scrape(counted)
    mine = {"route": "chat", "class_": "default"}
    assert seen.sum("requests_total", pool="a", status="200", ending="completed", **mine) == 3
    assert seen.sum("requests_total", pool="b", status="200", ending="completed", **mine) == 1
    assert seen.sum("requests_total", pool="", status="503", ending="refused", **mine) == 1
    assert seen.sum("requests_total") == 5


def test_tokens_count_by_kind() -> None:
    counted = counting()
    counted.observe(ended())
    counted.observe(ended(stream=False, completion_tokens=None))
    seen = scrape(counted)
    assert seen.sum("tokens_total", route="chat", pool="a", class_="default", kind="prompt") == 14
    assert seen.sum("tokens_total", kind="completion") == 5


def test_a_count_below_zero_does_not_lower_a_total() -> None:
    counted = counting()
    counted.observe(ended())
    counted.observe(ended(prompt_tokens=-100, completion_tokens=-100))
    assert scrape(counted).sum("tokens_total") == 12


def test_durations_fall_into_the_buckets_that_hold_them() -> None:
    counted = counting()
    counted.observe(ended(total_s=1.0))  # a bound belongs to its bucket
    counted.observe(ended(total_s=1.0001))
    counted.observe(ended(total_s=5000.0))
    seen = scrape(counted)
    of = {"route": "chat", "class_": "default"}
    below = [seen.sum("request_seconds_bucket", le=le, **of) for le in ("0.5", "1", "2.5", "600", "+Inf")]
    assert below == [0, 1, 2, 2, 3]
    assert seen.sum("request_seconds_count", **of) == 3
    assert seen.sum("request_seconds_sum", **of) == pytest.approx(5002.0001)
    assert seen.sum("admit_seconds_count", class_="default") == 3


def test_the_time_per_token_is_that_after_the_first_one() -> None:
    counted = counting()
    counted.observe(ended())
    seen = scrape(counted)
    assert seen.sum("time_per_output_token_seconds_sum", route="chat", pool="a") == pytest.approx(0.8 / 4)
    assert seen.sum("ttft_seconds_sum", route="chat", pool="a") == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("fields", "ttft", "per_token"),
    [
        ({"stream": False}, 0, 0),  # its first byte is its last
        ({"completion_tokens": 1}, 1, 0),
        ({"completion_tokens": None}, 1, 0),
        ({"ending": "client_gone", "status": 499}, 1, 0),
        ({"ttft_s": None, "ending": "refused", "status": 429}, 0, 0),
        ({}, 1, 1),
    ],
)
def test_only_streams_tell_of_first_bytes_and_only_whole_ones_of_tokens(
    fields: dict[str, Any], ttft: int, per_token: int
) -> None:
    counted = counting()
    counted.observe(ended(**fields))
    seen = scrape(counted)
    assert seen.sum("ttft_seconds_count") == ttft
    assert seen.sum("time_per_output_token_seconds_count") == per_token


def test_errors_count_by_code_and_retries_beyond_the_first_attempt() -> None:
    counted = counting()
    counted.observe(ended(attempts=3))
    counted.observe(ended(error_code="rate_limit_exceeded", status=429, ending="refused", attempts=0))
    seen = scrape(counted)
    assert seen.sum("errors_total", route="chat", error_code="rate_limit_exceeded") == 1
    assert seen.sum("retries_total", route="chat", pool="a") == 2
    assert seen.sum("errors_total") == 1


def test_the_engines_own_words_are_no_label() -> None:
    counted = counting()
    counted.observe(ended(status=400, ending="engine_refused", error_code="prompt: my secret"))
    text = exposition(counted.shared, {}, "1.0", "rev")
    assert "secret" not in text
    assert read(text).sum("errors_total", error_code="engine_refused") == 1


def test_nothing_of_the_caller_is_a_label() -> None:
    counted = counting()
    counted.observe(ended(request_id="req-mine"))
    text = exposition(counted.shared, {}, "1.0", "rev")
    assert all(word not in text for word in ("alice", "gpt-4o-mini", "req-mine"))


def test_a_request_refused_before_anything_is_known_counts_under_empty_labels() -> None:
    counted = counting()
    counted.observe(AccessRecord("req-1", "POST", "/v1/chat/completions", "rev", 0.0, status=401, ending="refused"))
    assert scrape(counted).sum("requests_total", route="", pool="", class_="", status="401", ending="refused") == 1


@pytest.mark.parametrize("bound", ["MAX_KEYS", "MAX_SERIES"])
def test_past_the_bound_everything_counts_under_other(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    counted = counting()
    counted.observe(ended())
    monkeypatch.setattr(instruments, bound, 1)
    for i in range(50):
        counted.observe(ended(route=f"route-{i}", error_code="no_replica"))
    seen = scrape(counted)
    assert seen.sum("requests_total", route="chat") == 1
    assert seen.sum("requests_total", route="other", pool="other", status="other") == 50
    assert seen.sum("tokens_total", kind="prompt") + seen.sum("tokens_total", kind="other") >= 51 * 7
    assert seen.sum("request_seconds_count") == 51
    assert len(counted._keys) <= 51


def test_a_full_slot_counts_under_other(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counting()
    monkeypatch.setattr(counted._slot, "add", lambda *_: None)
    counted.observe(ended())
    seen = scrape(counted)
    assert seen.sum("requests_total", route="other") == 1
    assert seen.sum("request_seconds_count", route="other") == 1


# --- gauges, and one process after another ------------------------------------------------------------------


def test_gauges_say_what_was_published_last_and_pools_at_rest_are_0() -> None:
    counted = counting()
    counted.publish({"a": 3, "b": 1}, 7, 0, is_redis_away=True)
    seen = scrape(counted)
    assert [seen.sum("requests_in_flight", pool=pool) for pool in "ab"] == [3, 1]
    assert (seen.sum("open_exchanges"), seen.sum("redis_away"), seen.sum("processes")) == (7, 1, 1)
    assert seen.sum("process_resident_memory_bytes", process="0") > 1_000_000
    counted.publish({"b": 1}, 1, 0, is_redis_away=False)
    seen = scrape(counted)
    assert [seen.sum("requests_in_flight", pool=pool) for pool in "ab"] == [0, 1]
    assert (seen.sum("open_exchanges"), seen.sum("redis_away")) == (1, 0)


def test_processes_add_up_whichever_is_asked() -> None:
    shared = SharedValues(2)
    first, second = counting(shared, 0), counting(shared, 1)
    for counted in (first, second, second):
        counted.observe(ended())
        counted.publish({"a": 2}, 2, 1, is_redis_away=False)
    assert scrape(first) == scrape(second)
    seen = scrape(first)
    assert seen.sum("requests_total", route="chat") == 3
    assert (seen.sum("requests_in_flight", pool="a"), seen.sum("access_records_dropped_total")) == (4, 2)


def test_a_dead_process_leaves_its_totals_and_none_of_its_gauges() -> None:
    shared = SharedValues(2)
    dead, other = counting(shared, 0), counting(shared, 1)
    dead.observe(ended())
    dead.publish({"a": 5}, 5, 3, is_redis_away=True)
    other.publish({}, 0, 0, is_redis_away=False)
    before = scrape(other)
    shared.slots[0].leave()
    seen = scrape(other)
    assert seen.growing() == before.growing()
    assert [seen.sum(name) for name in ("requests_in_flight", "open_exchanges", "redis_away", "processes")] == [
        0,
        0,
        0,
        1,
    ]


def test_a_successor_goes_on_with_the_totals_and_begins_its_gauges_at_0() -> None:
    shared = SharedValues(1)
    dead = counting(shared)
    dead.observe(ended())
    dead.publish({"a": 5}, 5, 3, is_redis_away=True)
    before = scrape(dead).growing()
    shared.slots[0].leave()
    successor = counting(shared)
    assert scrape(successor).sum("open_exchanges") == scrape(successor).sum("requests_in_flight") == 0
    successor.observe(ended())
    successor.publish({}, 1, 2, is_redis_away=False)
    seen = scrape(successor)
    assert all(seen.growing()[key] >= value for key, value in before.items())
    assert (seen.sum("requests_total"), seen.sum("access_records_dropped_total")) == (2, 5)
    assert (
        seen.sum("process_cpu_seconds_total")
        >= before["poolgate_process_cpu_seconds_total", frozenset({("process", "0")})]
    )


def test_a_process_that_ends_in_order_is_none_any_more() -> None:
    counted = counting()
    counted.close()
    assert scrape(counted).sum("processes") == 0
