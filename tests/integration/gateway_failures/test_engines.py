"""What callers see when engines fail: fallback, one error event, a status that says why."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fakes.engine import running_fake_engine
from fakes.line import LIMITED, running_gateway
from fakes.waits import eventually
from redis.asyncio import Redis

from gateway.domain.replica import HOSTS_KEY, FleetDocument, ReplicaRecord, ReplicaState, fleet_key

from .conftest import Pair, slot_is_free


async def test_fallback_serves_when_nobody_listens_at_the_target(pair: Pair) -> None:
    pair.first.process.kill()
    await pair.first.process.wait()
    reply = await pair.gateway.chat()
    assert (reply.status_code, reply.headers["x-poolgate-pool"]) == (200, "second")


async def test_request_too_long_for_the_fallback_is_not_sent_there(pair: Pair) -> None:
    pair.first.process.kill()
    await pair.first.process.wait()
    reply = await pair.gateway.chat(messages=[{"role": "user", "content": "word " * 400}], max_tokens=10)
    assert reply.status_code in (502, 503)
    assert await pair.second.requests("/v1/chat/completions") == []


@pytest.mark.parametrize("fault", [{"reset_after": 0}, {"close_after": 0}, {"die_after": 0}])
async def test_request_that_an_engine_broke_off_with_is_a_502_and_nobody_else_is_asked(
    pair: Pair, fault: dict[str, Any]
) -> None:
    assert (await pair.gateway.chat(LIMITED)).status_code == 200  # its connection is kept, and may be used again
    for stream in (False, True):
        reply = await pair.gateway.chat(LIMITED, stream=stream, x_fake=fault)
        assert (reply.status_code, reply.headers["content-type"]) == (502, "application/json")
        assert reply.headers["x-poolgate-error-source"] == "engine"
        assert await pair.second.requests("/v1/chat/completions") == []
        if "die_after" in fault:
            return
        assert await slot_is_free(pair.gateway)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "code"), [(500, 502), (401, 502), (429, 503), (503, 503)])
async def test_an_engine_that_says_no_is_asked_once_and_so_is_another_one(
    pair: Pair, status: int, code: int, stream: bool
) -> None:
    reply = await pair.gateway.chat(LIMITED, stream=stream, x_fake={"status": status})
    assert (reply.status_code, reply.headers["content-type"]) == (code, "application/json")
    assert reply.json()["error"]["code"] == ("engine_busy" if code == 503 else "engine_failed")
    assert ("retry-after" in reply.headers) == (code == 503)
    for engine in (pair.first, pair.second):
        assert len(await engine.requests("/v1/chat/completions")) == 1
    assert await slot_is_free(pair.gateway)


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_an_engines_core_died_with_is_not_given_to_the_next_one(pair: Pair, stream: bool) -> None:
    reply = await pair.gateway.chat(LIMITED, stream=stream, x_fake={"engine_dead_after": 0})
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "engine_died")
    assert await pair.second.requests("/v1/chat/completions") == []
    next_one = await pair.gateway.chat(LIMITED)
    assert (next_one.status_code, next_one.headers["x-poolgate-pool"]) == (200, "second")


async def test_a_stream_with_comments_carries_the_engines_events_untouched_and_a_late_refusal_as_an_event(
    tmp_path: Path, redis_url: str
) -> None:
    async with (
        running_fake_engine(name="tiny", key="") as engine,
        running_gateway(
            tmp_path,
            redis_url,
            gateway={"sse_keepalive_s": 0.2},
            pools={"tiny": {"urls": [engine.url], "served_name": "tiny", "max_model_len": 2048}},
        ) as gateway,
    ):
        slow = await gateway.chat(stream=True, x_fake={"delay_s": 1})
        assert slow.status_code == 200
        lines = [line for line in slow.text.split("\n") if line]
        comments = [line for line in lines if line.startswith(":")]
        assert len(comments) >= 2 and lines[: len(comments)] == comments
        assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines[len(comments) :])

        at_once = await gateway.chat(stream=True, x_fake={"status": 400})
        assert at_once.status_code == 400
        late = await gateway.chat(stream=True, x_fake={"status": 400, "delay_s": 1})
        assert (late.status_code, late.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        last = late.text.rstrip().split("\n")[-1]
        assert json.loads(last.removeprefix("data: ")) == at_once.json()
        assert "[DONE]" not in late.text


async def test_error_inside_the_first_event_is_seen_as_a_failure(pair: Pair) -> None:
    reply = await pair.gateway.chat(stream=True, x_fake={"error_event_after": 0})
    assert (reply.status_code, reply.json()["error"]["type"]) == (502, "upstream_error")


@pytest.mark.parametrize("fault", ["reset_after", "close_after", "stall_after", "die_after"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_failure_after_the_first_tokens_ends_in_one_error_event_and_no_done(
    pair: Pair, fault: str, path: str
) -> None:
    events = await pair.gateway.events(LIMITED, path, max_tokens=50, x_fake={fault: 3})
    assert "error" in json.loads(events[-1])
    assert [event for event in events if "error" in event] == events[-1:]
    assert "[DONE]" not in events and len(events) >= 4
    assert await pair.second.requests() == []

    async def counted() -> list[dict[str, Any]]:
        return [r for r in pair.gateway.access_lines() if r["key_id"] == "one" and r["ending"] == "upstream_error"]

    record = (await eventually(counted, "access record"))[0]
    assert record["completion_tokens"] >= 3 and record["prompt_tokens"] > 0
    assert await slot_is_free(pair.gateway)


async def test_aborted_answer_is_not_a_success(pair: Pair) -> None:
    reply = await pair.gateway.chat(x_fake={"abort": True})
    assert reply.status_code == 502


async def test_silent_engine_ends_in_504_that_names_the_deadline(pair: Pair) -> None:
    for stream in (False, True):
        reply = await pair.gateway.chat(LIMITED, stream=stream, x_fake={"headers_only": True})
        assert reply.status_code == 504
        assert "first byte" in reply.json()["error"]["message"]
        assert await slot_is_free(pair.gateway)


async def test_split_characters_and_line_separators_arrive_as_they_were_sent(pair: Pair) -> None:
    text = "한국 👍 a\u2028b\u2029c\u0085d"
    events = await pair.gateway.events(max_tokens=50, x_fake={"byte_by_byte": True, "text": text})
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert "".join(pieces) == text
    assert events[-1] == "[DONE]"


async def test_deltas_keep_fields_that_the_gateway_does_not_know(pair: Pair) -> None:
    extra = {"reasoning": "because", "x_future": {"a": [1]}}
    events = await pair.gateway.events(max_tokens=3, x_fake={"extra_delta": extra})
    assert any(json.loads(event)["choices"][0]["delta"].get("x_future") == {"a": [1]} for event in events[:-1])


async def test_streams_carry_the_headers_that_stop_proxies_from_buffering(pair: Pair) -> None:
    reply = await pair.gateway.chat(stream=True)
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["cache-control"] == "no-cache"


async def test_pool_that_has_no_replica_is_a_503_with_state_and_retry_after(tmp_path: Path, redis_url: str) -> None:
    pools = {"tiny": {"model": "/models/none"}}
    async with running_gateway(tmp_path, redis_url, pools=pools) as gateway:
        reply = await gateway.chat()
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert "tiny (no replica known)" in reply.json()["error"]["message"]
        assert (await gateway.client.get(gateway.url + "/ready")).status_code == 503
        assert (await gateway.client.get(gateway.url + "/health")).status_code == 200


async def test_replicas_stay_known_when_redis_comes_back_empty(
    tmp_path: Path, redis_url: str, redis_client: Redis
) -> None:
    async with (
        running_fake_engine(name="tiny", key="") as engine,
        running_gateway(tmp_path, redis_url, pools={"tiny": {"model": "/models/none"}}) as gateway,
    ):
        record = ReplicaRecord("tiny/0@h", "tiny", engine.url, ReplicaState.READY, "tiny", 0.0, max_model_len=2048)
        await redis_client.zadd(HOSTS_KEY, {"h": 1})
        await redis_client.set(fleet_key("h"), FleetDocument("h", "rev", 0.0, (record,)).to_json())

        async def serves() -> bool:
            return (await gateway.chat()).status_code == 200

        await eventually(serves, "the published replica serves")
        await redis_client.flushall()

        async def is_noticed() -> bool:
            assert await serves()
            return "publishes nothing" in gateway.log.read_text()

        await eventually(is_noticed, "the gateway notices, and serves all the while")
        assert await serves()


async def test_one_hung_pool_does_not_delay_another(tmp_path: Path, redis_url: str) -> None:
    async with (
        running_fake_engine("--fake-health-only", name="hung", key="") as hung,
        running_fake_engine(name="well", key="") as well,
        running_gateway(
            tmp_path,
            redis_url,
            gateway={"timeouts": {"first_byte_s": 5}},
            pools={n: {"urls": [e.url], "served_name": n} for n, e in (("hung", hung), ("well", well))},
            routes={n: {"targets": [{"pool": n}]} for n in ("hung", "well")},
        ) as gateway,
    ):
        stuck = [asyncio.create_task(gateway.chat(model="hung")) for _ in range(50)]

        async def all_wait() -> bool:
            return bool((await hung.state())["calls"].get("POST /v1/chat/completions", 0) == 50)

        await eventually(all_wait, "50 requests hang")
        assert {(await gateway.chat(model="well")).status_code for _ in range(10)} == {200}
        assert not any(task.done() for task in stuck)
        assert {reply.status_code for reply in await asyncio.gather(*stuck)} == {504}
