"""The handler of the proxied paths: one reply and one record for every request, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.bodies import MESSAGES, any_body
from fakes.client import KEY, Client, Headers, Timers
from fakes.story import ALICE, a_config

from gateway.dispatch import Caller
from gateway.domain.endpoint import Endpoint, ErrorShape
from gateway.domain.errors import InvalidKey, NoReplica, UpstreamBroken
from gateway.domain.record import AccessRecord
from gateway.domain.request import InferenceRequest, Principal
from gateway.edge import context, inference
from gateway.edge.inference import inference_handlers
from gateway.edge.lane import Handler
from gateway.edge.large import LARGE_BYTES
from gateway.runtime import Runtime
from gateway.telemetry.access import line_of

BODY = json.dumps({"model": "chat", "messages": MESSAGES}).encode()
STREAM = json.dumps({"model": "chat", "messages": MESSAGES, "stream": True}).encode()
Serve = Callable[[InferenceRequest, Caller], Awaitable[None]]


async def fine(request: InferenceRequest, caller: Caller) -> None:
    caller.reply(200, [], b"ok")


class World:
    """A runtime whose dispatcher is the test's own function."""

    def __init__(self, serve: Serve = fine) -> None:
        self.requests: list[InferenceRequest] = []
        self.records: list[AccessRecord] = []
        self._serve = serve
        config = a_config(
            classes={"default": {}, "gold": {"priority": -1}, "batch": {"priority": 9}},
            gateway={"max_body_bytes": 1024},
        )
        parts: Any = self
        self.runtime = Runtime(config, parts, parts, parts, parts, None)

    def known(self, presented: bytes) -> None:
        """Every key has to be asked for."""

    async def authenticate(self, presented: bytes) -> Principal:
        if presented != b"sk-test":
            raise InvalidKey
        return ALICE

    async def serve(self, request: InferenceRequest, caller: Caller, record: AccessRecord) -> None:
        self.requests.append(request)
        await self._serve(request, caller)

    def write(self, record: AccessRecord) -> None:
        self.records.append(replace(record))

    async def handle(self, client: Client) -> AccessRecord:
        await client.call(self.handlers())
        return self.record()

    def handlers(self) -> dict[bytes, Handler]:
        return inference_handlers(lambda: self.runtime)

    def record(self) -> AccessRecord:
        """The only one; no exchange is open any more."""
        assert not self.runtime.exchanges
        (record,) = self.records
        assert record.total_s >= 0
        return record


async def answered(client: Client, serve: Serve = fine) -> AccessRecord:
    return await World(serve).handle(client)


def headers(*more: tuple[bytes, bytes]) -> Headers:
    return [KEY, *more]


# --- the straight path --------------------------------------------------------------------------------------


async def test_a_request_is_dispatched_with_what_the_edge_knows() -> None:
    world = World()
    client = Client(BODY, headers=headers((b"x-request-id", b"mine"), (b"x-poolgate-class", b"batch")))
    record = await world.handle(client)
    (request,) = world.requests
    assert (request.id, request.class_name, request.principal) == ("mine", "batch", ALICE)
    assert client.status == 200 and client.body == b"ok" and client.headers[b"x-request-id"] == b"mine"
    assert (record.request_id, record.status, record.class_name) == ("mine", 200, "batch")
    assert (record.key_id, record.user, record.model) == ("alice-dev", "alice", "chat")


async def test_a_request_ends_with_its_reply_and_not_with_what_the_gateway_waits_for_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(inference, "time", clock)
    monkeypatch.setattr(context, "time", clock)

    async def waits_for_the_engine(request: InferenceRequest, caller: Caller) -> None:
        nonlocal now
        now = 102.0
        caller.reply(200, [], b"ok")
        now = 103.0

    assert (await answered(Client(BODY), waits_for_the_engine)).total_s == 2.0


async def test_of_the_callers_headers_only_trace_and_session_travel() -> None:
    parent = b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"
    passed = [(b"traceparent", parent), (b"tracestate", b"a=b"), (b"x-session-id", b"s")]
    kept_here = [
        (b"x-api-key", b"sk-other"),
        (b"cookie", b"c"),
        (b"x-data-parallel-rank", b"1"),
        (b"x-vllm-priority", b"-5"),
        (b"x-request-id", b"mine"),
        (b"connection", b"close"),
        (b"content-length", b"%d" % len(BODY)),
    ]
    world = World()
    await world.handle(Client(BODY, headers=headers(*passed, *kept_here)))
    assert list(world.requests[0].headers) == passed


@pytest.mark.parametrize(
    "parents",
    [
        [b"x"],
        [b""],
        [b"00-" + b"0" * 32 + b"-" + b"2" * 16 + b"-01"],
        [b"00-" + b"1" * 32 + b"-" + b"0" * 16 + b"-01"],
        [b"ff-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"],
        [b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"] * 2,
        [],
    ],
    ids=["word", "empty", "no trace", "no span", "version", "twice", "state alone"],
)
async def test_an_invalid_trace_header_does_not_reach_the_engine(parents: list[bytes]) -> None:
    world = World()
    trace = [*((b"traceparent", parent) for parent in parents), (b"tracestate", b"a=b")]
    await world.handle(Client(BODY, headers=headers(*trace, (b"x-session-id", b"s"))))
    assert list(world.requests[0].headers) == [(b"x-session-id", b"s")]


@pytest.mark.parametrize("fails", [False, True])
async def test_neither_key_nor_prompt_nor_output_gets_into_the_access_line_or_the_log(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(request: InferenceRequest, caller: Caller) -> None:
        if fails:
            raise NoReplica("no", retry_after_s=1)
        caller.start(200, [])
        caller.finish(b"canary-output")

    caplog.set_level(0)
    body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "canary-prompt"}], "user": "canary-u"})
    record = await answered(Client(body.encode(), headers=headers((b"cookie", b"canary-cookie"))), serve)
    refused = await answered(Client(body.encode(), headers=[(b"authorization", b"Bearer canary-key")]), serve)
    shown = line_of(record) + line_of(refused) + caplog.text.encode()
    assert b"canary" not in shown and b"sk-test" not in shown


# --- refusals: a reply, and a record that says why ----------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "status", "code"),
    [
        (lambda: Client(BODY, method="GET"), 405, "method_not_allowed"),
        (lambda: Client(BODY, headers=[]), 401, "invalid_api_key"),
        (lambda: Client(BODY, headers=[(b"x-api-key", "clé".encode())]), 401, "invalid_api_key"),
        (lambda: Client(BODY, headers=headers((b"x-poolgate-class", b"gold"))), 403, "not_allowed"),
        (lambda: Client(BODY, headers=headers((b"x-poolgate-class", b"none"))), 400, "invalid_request"),
        (lambda: Client(b"{"), 400, "invalid_request"),
        (lambda: Client([BODY, b" " * 1024]), 413, "request_too_large"),
        (lambda: Client(BODY, headers=headers((b"content-encoding", b"br"))), 415, "unsupported_content_encoding"),
    ],
    ids=["method", "no key", "odd key", "class above", "no class", "json", "size", "gzip"],
)
async def test_a_bad_request_is_refused_before_it_is_dispatched(
    client: Callable[[], Client], status: int, code: str
) -> None:
    made, world = client(), World()
    record = await world.handle(made)
    assert world.requests == []
    assert (made.status, made.error()["code"]) == (status, code)
    assert made.headers[b"x-poolgate-error-source"] == b"client"
    assert (record.status, record.error_code, record.ending) == (status, code, "refused")
    assert made.headers[b"x-request-id"].decode() == record.request_id


async def test_the_wrong_method_is_told_the_right_one() -> None:
    client = Client(BODY, method="DELETE")
    await answered(client)
    assert client.headers[b"allow"] == b"POST"


async def test_a_pool_that_loads_is_a_503_of_ours_and_no_defect() -> None:
    async def loading(request: InferenceRequest, caller: Caller) -> None:
        raise NoReplica("a (starting)", retry_after_s=5)

    client = Client(BODY)
    record = await answered(client, loading)
    assert (client.status, client.headers[b"retry-after"]) == (503, b"5")
    assert client.headers[b"x-poolgate-error-source"] == b"gateway"
    assert (record.ending, record.error_code) == ("refused", "model_not_ready")


async def test_a_defect_of_ours_is_a_500_that_tells_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: InferenceRequest, caller: Caller) -> None:
        raise ZeroDivisionError("secret detail")

    client = Client(BODY)
    record = await answered(client, broken)
    assert client.status == 500 and client.error()["code"] == "internal_error"
    assert b"secret" not in client.body and "secret detail" in caplog.text
    assert (record.status, record.ending) == (500, "failed")


# --- failures after the first byte --------------------------------------------------------------------------


async def test_a_stream_that_fails_ends_with_an_error_event_and_no_end_mark() -> None:
    async def breaking(request: InferenceRequest, caller: Caller) -> None:
        caller.start(200, [])
        caller.write(b"data: 1\n\n")
        raise UpstreamBroken("The engine closed the connection.")

    client = Client(STREAM)
    record = await answered(client, breaking)
    first, last, rest = client.body.split(b"\n\n")
    assert first == b"data: 1" and rest == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_broken"
    assert client.is_whole and b"[DONE]" not in client.body
    assert (record.status, record.ending, record.error_code) == (502, "upstream_error", "upstream_broken")


async def test_a_stream_whose_handler_left_it_without_an_end_is_cut() -> None:
    async def forgetful(request: InferenceRequest, caller: Caller) -> None:
        caller.start(200, [])
        caller.write(b"data: 1\n\n")

    client = Client(STREAM)
    await answered(client, forgetful)
    assert client.line.was_cut and not client.is_whole


# --- hang-ups, and the end of the process -------------------------------------------------------------------


class Busy:
    """A dispatcher that never ends; streams one event first if told to."""

    def __init__(self, *, starts: bool = False) -> None:
        self.entered = asyncio.Event()
        self.was_cancelled = False
        self._starts = starts

    async def __call__(self, request: InferenceRequest, caller: Caller) -> None:
        if self._starts:
            caller.start(200, [])
            caller.write(b"data: 1\n\n")
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def busy_with(client: Client, *, starts: bool = False) -> tuple[World, Busy]:
    busy = Busy(starts=starts)
    world = World(busy)
    client.connect(world.handlers())
    client.ask()
    await asyncio.wait_for(busy.entered.wait(), 5)
    return world, busy


@pytest.mark.parametrize("starts", [False, True])
async def test_a_caller_who_hangs_up_ends_the_work_and_gets_nothing_more(starts: bool) -> None:
    client = Client(STREAM)
    world, busy = await busy_with(client, starts=starts)
    sent = len(client.line.written)
    client.hang_up()
    await client.idle()
    record = world.record()
    assert busy.was_cancelled and len(client.line.written) == sent
    assert (record.status, record.ending, record.error_code) == (499, "client_gone", "client_closed_request")


async def test_a_caller_who_leaves_while_sending_is_recorded_as_gone() -> None:
    client, world = Client([BODY[:5], BODY[5:]]), World()
    client.connect(world.handlers())
    client.ask(but_the_last=1)
    await asyncio.sleep(0)  # one turn of the loop: the handler waits for the rest
    client.hang_up()
    await client.idle()
    record = world.record()
    assert client.replies() == []
    assert (record.status, record.ending) == (499, "client_gone")


async def test_the_drains_end_is_a_503_for_who_has_no_reply_yet() -> None:
    client = Client(STREAM)
    world, busy = await busy_with(client)
    world.runtime._end_all()
    await client.idle()
    record = world.record()
    assert busy.was_cancelled
    assert (client.status, client.error()["code"], client.headers[b"retry-after"]) == (503, "shutting_down", b"1")
    assert (record.status, record.error_code) == (503, "shutting_down")


async def test_the_drains_end_is_an_error_event_for_a_running_stream() -> None:
    client = Client(STREAM)
    world, _ = await busy_with(client, starts=True)
    world.runtime._end_all()
    await client.idle()
    assert client.is_whole and b'"shutting_down"' in client.body


async def test_a_caller_who_leaves_while_it_is_told_of_the_end_is_no_failure_of_the_handler() -> None:
    client = Client(STREAM)
    world, _ = await busy_with(client, starts=True)
    world.runtime._end_all()
    client.hang_up()
    await client.idle()
    assert world.record().error_code == "client_closed_request"


async def test_a_caller_is_told_when_the_server_is_made_to_stop_at_once() -> None:
    client = Client(STREAM)
    world, busy = await busy_with(client)
    for task in client.state.tasks:
        task.cancel()
    await client.idle()
    assert busy.was_cancelled and world.record().error_code == "shutting_down"
    assert (client.status, client.error()["code"]) == (503, "shutting_down")


async def test_a_caller_that_stopped_reading_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def writing(request: InferenceRequest, caller: Caller) -> None:
        caller.start(200, [])
        client.stop_reading()
        caller.write(b"data: 1\n\n")
        waiting.set()
        await caller.drained()

    client, timers, world, waiting = Client(STREAM), Timers(), World(writing), asyncio.Event()
    client.connect(world.handlers(), write_s=60, timers=timers)
    client.ask()
    await waiting.wait()
    timers.advance(59)
    assert not client.line.is_closed
    timers.advance(1)
    assert client.line.was_cut and "did not read its reply" in caplog.text
    await client.idle()
    record = world.record()
    assert (record.status, record.ending) == (499, "client_gone")


# --- the other paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_every_path_takes_its_body_and_refuses_one_that_is_none_in_its_own_shape(endpoint: Endpoint) -> None:
    body, content_type = any_body(endpoint)
    world = World()
    record = await world.handle(Client(body, path=endpoint.value, headers=headers((b"content-type", content_type))))
    assert (record.status, record.path, world.requests[0].endpoint) == (200, endpoint.value, endpoint)

    client = Client(b"{", path=endpoint.value, headers=headers())
    assert (await World().handle(client)).status == 400
    error = json.loads(client.body)
    if endpoint.rules.errors is ErrorShape.ANTHROPIC:
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    else:
        assert set(error["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_a_body_of_exactly_the_limit_is_read_and_one_byte_more_is_413_on_every_path(endpoint: Endpoint) -> None:
    body, content_type = any_body(endpoint)
    limit = 1024
    if endpoint.rules.is_form:
        filling = limit - len(body)
        full = [body.replace(b"RIFF", b"RIFF" + b"\xff" * (filling + extra)) for extra in (-1, 0, 1)]
    else:
        full = [body.ljust(limit + extra) for extra in (-1, 0, 1)]
    assert [len(one) for one in full] == [limit - 1, limit, limit + 1]
    records = [
        await World().handle(Client(one, path=endpoint.value, headers=headers((b"content-type", content_type))))
        for one in full
    ]
    assert [record.status for record in records] == [200, 200, 413]


async def test_a_messages_stream_that_fails_ends_with_anthropics_error_event() -> None:
    async def fails(request: InferenceRequest, caller: Caller) -> None:
        caller.start(200, [(b"content-type", b"text/event-stream")])
        caller.write(b'event: message_start\ndata: {"type":"message_start"}\n\n')
        raise UpstreamBroken("The engine ended the stream.", response_began=True)

    body = json.dumps({"model": "chat", "messages": MESSAGES, "max_tokens": 5, "stream": True}).encode()
    client = Client(body, path=Endpoint.MESSAGES.value, headers=headers())
    await World(fails).handle(client)
    name, data = client.body.rstrip(b"\n").split(b"\n\n")[-1].split(b"\n")
    assert name == b"event: error"
    expected = {"type": "error", "error": {"type": "api_error", "message": "The engine ended the stream."}}
    assert json.loads(data.removeprefix(b"data: ")) == expected


async def test_a_large_body_waits_for_another_one_and_nobody_waits_for_it() -> None:
    world = World()
    config = a_config(gateway={"max_body_bytes": 10_000_000})
    world.runtime = replace(world.runtime, loaded=config)
    large = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "x" * LARGE_BYTES}]}).encode()
    first, second = Client(large, headers=[KEY]), Client(BODY, headers=[KEY])
    async with world.runtime.large_bodies:
        waiting = asyncio.create_task(first.call(world.handlers()))
        await second.call(world.handlers())
        assert second.status == 200
        assert [request.body_bytes for request in world.requests] == [len(BODY)]
    await waiting
    assert first.status == 200
    assert world.requests[-1].body_bytes == len(large)
