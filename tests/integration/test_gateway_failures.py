"""What callers see when engines, callers or limits get in the way: through a real gateway and fake engines."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.engine import FakeEngine, running_fake_engine
from fakes.line import KEY, MESSAGES, Gateway, running_gateway, sha256
from fakes.ports import free_port
from fakes.waits import eventually
from redis.asyncio import Redis

from gateway.domain.replica import HOSTS_KEY, FleetDocument, ReplicaRecord, ReplicaState, fleet_key

LIMITED = "sk-test-limited-0123456789"


@dataclass
class Pair:
    gateway: Gateway
    first: FakeEngine
    second: FakeEngine


@pytest.fixture
async def pair(tmp_path: Path, redis_url: str) -> AsyncIterator[Pair]:
    """Two pools behind one route, the second as fallback; short deadlines; a key with one request in flight."""
    async with (
        running_fake_engine(
            "--fake-itl-ms", "5", "--fake-tokens", "5000", "--max-model-len", "2048", name="first", key=""
        ) as first,
        running_fake_engine("--max-model-len", "256", name="second", key="") as second,
        running_gateway(
            tmp_path,
            redis_url,
            gateway={"timeouts": {"first_byte_s": 1, "gap_s": 1, "connect_s": 1, "body_s": 1, "write_s": 2}},
            keys={"test": {"sha256": sha256(KEY)}, "one": {"sha256": sha256(LIMITED), "limits": {"in_flight": 1}}},
            pools={
                "first": {"urls": [first.url], "served_name": "first", "max_model_len": 2048},
                "second": {"urls": [second.url], "served_name": "second", "max_model_len": 256},
            },
            routes={"chat": {"targets": [{"pool": "first"}], "fallback": ["second"]}},
        ) as gateway,
    ):
        yield Pair(gateway, first, second)


async def slot_is_free(gateway: Gateway) -> bool:
    return (await gateway.chat(LIMITED)).status_code == 200


# --- upstream -------------------------------------------------------------------------------------------------------


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


# --- callers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["before the head", "before the first event", "mid stream", "plain"])
async def test_caller_that_leaves_frees_the_engine_and_the_slot(pair: Pair, phase: str) -> None:
    fields: dict[str, Any] = {
        "before the head": {"stream": True, "x_fake": {"delay_s": 60}},
        "before the first event": {"stream": True, "x_fake": {"headers_only": True}},
        "mid stream": {"stream": True, "max_tokens": 1000},
        "plain": {"stream": False, "max_tokens": 1000},
    }[phase]
    body = json.dumps({"model": "chat", "messages": MESSAGES} | fields).encode()
    host, port = pair.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: %b\r\nContent-Length: %d\r\n\r\n%b"
        % (LIMITED.encode(), len(body), body)
    )

    async def runs() -> bool:
        return bool((await pair.first.state())["calls"].get("POST /v1/chat/completions"))

    await eventually(runs, "the engine has the request")
    if phase == "mid stream":
        await reader.readuntil(b"data: ")
    else:
        assert (await pair.gateway.chat(LIMITED)).status_code == 429  # the slot is taken
    writer.transport.abort()

    async def is_aborted() -> bool:
        state = await pair.first.state()
        return state["aborted"] == 1 and state["running"] == 0

    await eventually(is_aborted, "the engine stops generating", 5)
    await eventually(lambda: slot_is_free(pair.gateway), "the slot is given back", 5)


async def test_disconnects_in_numbers_leave_nothing_behind(pair: Pair) -> None:
    async def hang_up(i: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await pair.gateway.client.post(
                pair.gateway.url + "/v1/chat/completions",
                json={"model": "chat", "messages": MESSAGES, "max_tokens": 1900, "stream": False},
                headers={"x-api-key": KEY},
                timeout=httpx.Timeout(5, read=0.05 + i % 7 / 50),
            )

    for _ in range(4):
        await asyncio.gather(*(hang_up(i) for i in range(50)))

    async def is_idle() -> bool:
        return bool((await pair.first.state())["running"] == 0)

    await eventually(is_idle, "no request runs", 5)
    connections = sum(1 for _ in Path(f"/proc/{pair.gateway.pid}/fd").iterdir())
    assert connections < 100
    assert (await pair.gateway.chat()).status_code == 200
    assert "Traceback" not in pair.gateway.log.read_text()


async def test_stalled_upload_ends_in_408(pair: Pair) -> None:
    host, port = pair.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: %b\r\nContent-Length: 1000\r\n\r\n{"
        % KEY.encode()
    )
    answer = await asyncio.wait_for(reader.read(4096), 10)
    assert answer.startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_caller_that_stops_reading_is_dropped_and_the_engine_freed(pair: Pair) -> None:
    body = json.dumps(
        {"model": "chat", "messages": MESSAGES, "stream": True, "max_tokens": 1900, "x_fake": {"text": "x" * 7_500_000}}
    ).encode()
    host, port = pair.gateway.url.removeprefix("http://").split(":")
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.connect((host, int(port)))
        await asyncio.get_running_loop().run_in_executor(
            None,
            caller.sendall,
            (
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: %b\r\nContent-Length: %d\r\n\r\n%b"
                % (KEY.encode(), len(body), body)
            ),
        )

        async def is_dropped() -> bool:
            return [record["ending"] for record in pair.gateway.access_lines()] == ["client_gone"]

        await eventually(is_dropped, "the stalled caller is given up", 15)

        async def is_freed() -> bool:
            return bool((await pair.first.state())["running"] == 0)

        await eventually(is_freed, "the engine stops generating", 5)
    assert (await pair.gateway.chat()).status_code == 200


# --- limits ---------------------------------------------------------------------------------------------------------


async def test_limits_answer_429_with_the_time_and_the_headers(tmp_path: Path, redis_url: str) -> None:
    async with (
        running_fake_engine(name="tiny", key="") as engine,
        running_gateway(
            tmp_path,
            redis_url,
            keys={
                "requests": {"sha256": sha256(KEY), "limits": {"requests_per_min": 3}},
                "tokens": {"sha256": sha256(LIMITED), "limits": {"tokens_per_min": 200}},
                "a": {"sha256": sha256("sk-user-key-a"), "user": "alice"},
                "b": {"sha256": sha256("sk-user-key-b"), "user": "alice"},
            },
            users={"alice": {"limits": {"requests_per_min": 2}}},
            pools={"tiny": {"urls": [engine.url], "served_name": "tiny", "max_model_len": 2048}},
        ) as gateway,
    ):
        remaining = []
        for _ in range(3):
            reply = await gateway.chat()
            assert reply.status_code == 200
            assert reply.headers["x-ratelimit-limit-requests"] == "3"
            remaining.append(int(reply.headers["x-ratelimit-remaining-requests"]))
        assert remaining == [2, 1, 0]
        refused = await gateway.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 62
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"

        # streams are charged with the engine's own count, in both paths
        for path in ("/v1/chat/completions", "/v1/completions"):
            await gateway.events(LIMITED, path, max_tokens=5)
        left = int((await gateway.chat(LIMITED, max_tokens=1)).headers["x-ratelimit-remaining-tokens"])

        async def three_records() -> list[int]:
            records = [r for r in gateway.access_lines() if r["key_id"] == "tokens"]
            return [r["prompt_tokens"] + r["completion_tokens"] for r in records] if len(records) == 3 else []

        spent = sum(await eventually(three_records, "access records"))
        assert spent > 0 and 200 - left < 2 * spent + 60
        too_many = await gateway.chat(LIMITED, max_tokens=199)
        assert too_many.status_code == 429

        # a user's limit is shared by the keys of the user
        assert [(await gateway.chat(f"sk-user-key-{k}")).status_code for k in "aba"] == [200, 200, 429]


async def test_limit_holds_over_two_gateways(tmp_path: Path, redis_url: str) -> None:
    keys = {"test": {"sha256": sha256(KEY), "limits": {"requests_per_min": 10}}}
    async with running_fake_engine(name="tiny", key="") as engine:
        pools = {"tiny": {"urls": [engine.url], "served_name": "tiny", "max_model_len": 2048}}
        async with (
            running_gateway(tmp_path / "a", redis_url, keys=keys, pools=pools) as one,
            running_gateway(tmp_path / "b", redis_url, keys=keys, pools=pools) as two,
        ):
            replies = await asyncio.gather(*((one, two)[i % 2].chat() for i in range(30)))
    assert sorted(reply.status_code for reply in replies) == [200] * 10 + [429] * 20


async def test_several_processes_serve_one_port_and_stop_together(tmp_path: Path, redis_url: str) -> None:
    async with running_fake_engine(name="tiny", key="") as engine:
        pools = {"tiny": {"urls": [engine.url], "served_name": "tiny", "max_model_len": 2048}}
        async with running_gateway(tmp_path, redis_url, gateway={"processes": 3}, pools=pools) as gateway:
            children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children")
            pids = children.read_text().split()
            assert len(pids) == 3
            assert {(await gateway.chat()).status_code for _ in range(20)} == {200}
            gateway.process.terminate()
            assert await asyncio.wait_for(gateway.process.wait(), 20) == 0
            assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


# --- start and stop -------------------------------------------------------------------------------------------------


async def test_sigterm_lets_running_streams_finish_and_takes_no_new_ones(pair: Pair) -> None:
    stream = asyncio.create_task(pair.gateway.events(max_tokens=200))

    async def runs() -> bool:
        return bool((await pair.first.state())["running"])

    await eventually(runs, "the stream runs")
    pair.gateway.process.terminate()

    async def is_refused() -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False) as fresh:
                return (await fresh.get(pair.gateway.url + "/ready")).status_code == 503
        except httpx.TransportError:
            return True

    await eventually(is_refused, "new connections are refused")
    events = await stream
    assert events[-1] == "[DONE]" and len(events) > 200
    assert await asyncio.wait_for(pair.gateway.process.wait(), 10) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_second_signal_ends_at_once_and_tells_the_callers(pair: Pair, second: signal.Signals) -> None:
    stream = asyncio.create_task(pair.gateway.events(max_tokens=1900))
    plain = asyncio.create_task(pair.gateway.chat(max_tokens=1900))

    async def run() -> bool:
        return bool((await pair.first.state())["running"] == 2)

    await eventually(run, "both run")
    pair.gateway.process.terminate()

    async def drains() -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False) as fresh:
                return (await fresh.get(pair.gateway.url + "/ready")).status_code == 503
        except httpx.TransportError:
            return True

    await eventually(drains, "the first signal is noticed")
    pair.gateway.process.send_signal(second)
    assert json.loads((await stream)[-1])["error"]["code"] == "shutting_down"
    reply = await plain
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
    assert reply.headers["x-request-id"]
    assert await asyncio.wait_for(pair.gateway.process.wait(), 4) == 0  # drain_s is 5


async def test_stream_that_outlasts_the_drain_gets_an_error_event(pair: Pair) -> None:
    stream = asyncio.create_task(pair.gateway.events(max_tokens=1900))  # 9.5 s; drain_s is 5

    async def runs() -> bool:
        return bool((await pair.first.state())["running"])

    await eventually(runs, "the stream runs")
    pair.gateway.process.terminate()
    events = await stream
    assert json.loads(events[-1])["error"]["code"] == "shutting_down"
    assert await asyncio.wait_for(pair.gateway.process.wait(), 10) == 0
    assert any(r["error_code"] == "shutting_down" for r in pair.gateway.access_lines())


async def test_taken_port_is_one_clear_line(tmp_path: Path, redis_url: str) -> None:
    from fakes.line import process, write_config

    port = free_port()
    config = write_config(
        tmp_path,
        gateway={"port": port},
        redis={"url": redis_url},
        pools={"a": {"urls": ["http://127.0.0.1:9"]}},
        routes={"a": {"targets": [{"pool": "a"}]}},
    )
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", port)
    async with server, process(["serve", "--config", str(config)], tmp_path / "log") as (child, log):
        assert await asyncio.wait_for(child.wait(), 20) == 1
        text = log.read_text()
    assert f"gateway.port: 127.0.0.1:{port}" in text and "another port" in text
    assert "Traceback" not in text
