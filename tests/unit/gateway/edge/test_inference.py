"""The handler of the proxied paths: one reply and one record for every request, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from fakes.asgi import KEY, Headers, Server
from fakes.story import ALICE, MESSAGES, a_config

from gateway.dispatch import Caller
from gateway.domain.errors import InvalidKey, NoReplica, UpstreamBroken
from gateway.domain.record import AccessRecord
from gateway.domain.request import Endpoint, InferenceRequest, Principal
from gateway.edge.context import Exchange
from gateway.edge.inference import handle
from gateway.runtime import Runtime
from gateway.telemetry.access import line_of

BODY = json.dumps({"model": "chat", "messages": MESSAGES}).encode()
STREAM = json.dumps({"model": "chat", "messages": MESSAGES, "stream": True}).encode()
Serve = Callable[[InferenceRequest, Caller], Awaitable[None]]


async def fine(request: InferenceRequest, caller: Caller) -> None:
    await caller.start(200, [(b"content-length", b"2")])
    await caller.finish(b"ok")


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
        self.runtime = Runtime(config, parts, parts, parts, parts, parts, None)

    async def authenticate(self, presented: bytes) -> Principal:
        if presented != b"sk-test":
            raise InvalidKey
        return ALICE

    async def serve(self, request: InferenceRequest, caller: Caller, record: AccessRecord) -> None:
        self.requests.append(request)
        await self._serve(request, caller)

    def write(self, record: AccessRecord) -> None:
        self.records.append(replace(record))

    async def handle(self, server: Server) -> AccessRecord:
        await handle(self.runtime, Endpoint.CHAT, Exchange(server.scope, server.receive, server.send))
        assert not self.runtime.exchanges
        (record,) = self.records
        assert record.total_s >= 0
        return record


async def answered(server: Server, serve: Serve = fine) -> AccessRecord:
    return await World(serve).handle(server)


def headers(*more: tuple[bytes, bytes]) -> Headers:
    return [KEY, *more]


# --- the straight path --------------------------------------------------------------------------------------


async def test_a_request_is_dispatched_with_what_the_edge_knows() -> None:
    world = World()
    server = Server(BODY, headers=headers((b"x-request-id", b"mine"), (b"x-poolgate-class", b"batch")))
    record = await world.handle(server)
    (request,) = world.requests
    assert (request.id, request.class_name, request.principal) == ("mine", "batch", ALICE)
    assert server.status == 200 and server.body == b"ok" and server.headers[b"x-request-id"] == b"mine"
    assert (record.request_id, record.status, record.class_name) == ("mine", 200, "batch")
    assert (record.key_id, record.user, record.model) == ("alice-dev", "alice", "chat")


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
    await world.handle(Server(BODY, headers=headers(*passed, *kept_here)))
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
    await world.handle(Server(BODY, headers=headers(*trace, (b"x-session-id", b"s"))))
    assert list(world.requests[0].headers) == [(b"x-session-id", b"s")]


@pytest.mark.parametrize("fails", [False, True])
async def test_neither_key_nor_prompt_nor_output_gets_into_the_access_line_or_the_log(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(request: InferenceRequest, caller: Caller) -> None:
        if fails:
            raise NoReplica("no", retry_after_s=1)
        await caller.start(200, [])
        await caller.finish(b"canary-output")

    caplog.set_level(0)
    body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "canary-prompt"}], "user": "canary-u"})
    record = await answered(Server(body.encode(), headers=headers((b"cookie", b"canary-cookie"))), serve)
    refused = await answered(Server(body.encode(), headers=[(b"authorization", b"Bearer canary-key")]), serve)
    shown = line_of(record) + line_of(refused) + caplog.text.encode()
    assert b"canary" not in shown and b"sk-test" not in shown


# --- refusals: a reply, and a record that says why ----------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "status", "code"),
    [
        (lambda: Server(BODY, method="GET"), 405, "method_not_allowed"),
        (lambda: Server(BODY, headers=[]), 401, "invalid_api_key"),
        (lambda: Server(BODY, headers=[(b"x-api-key", "clé".encode())]), 401, "invalid_api_key"),
        (lambda: Server(BODY, headers=headers((b"x-poolgate-class", b"gold"))), 403, "not_allowed"),
        (lambda: Server(BODY, headers=headers((b"x-poolgate-class", b"none"))), 400, "invalid_request"),
        (lambda: Server(b"{"), 400, "invalid_request"),
        (lambda: Server([BODY, b" " * 1024]), 413, "request_too_large"),
        (lambda: Server(BODY, headers=headers((b"content-encoding", b"gzip"))), 415, "unsupported_content_encoding"),
    ],
    ids=["method", "no key", "odd key", "class above", "no class", "json", "size", "gzip"],
)
async def test_a_bad_request_is_refused_before_it_is_dispatched(
    server: Callable[[], Server], status: int, code: str
) -> None:
    made, world = server(), World()
    record = await world.handle(made)
    assert world.requests == []
    assert (made.status, made.error()["code"]) == (status, code)
    assert made.headers[b"x-poolgate-error-source"] == b"client"
    assert (record.status, record.error_code, record.ending) == (status, code, "refused")
    assert made.headers[b"x-request-id"].decode() == record.request_id


async def test_the_wrong_method_is_told_the_right_one() -> None:
    server = Server(BODY, method="DELETE")
    await answered(server)
    assert server.headers[b"allow"] == b"POST"


async def test_a_pool_that_loads_is_a_503_of_ours_and_no_defect() -> None:
    async def loading(request: InferenceRequest, caller: Caller) -> None:
        raise NoReplica("a (starting)", retry_after_s=5)

    server = Server(BODY)
    record = await answered(server, loading)
    assert (server.status, server.headers[b"retry-after"]) == (503, b"5")
    assert server.headers[b"x-poolgate-error-source"] == b"gateway"
    assert (record.ending, record.error_code) == ("refused", "model_not_ready")


async def test_a_defect_of_ours_is_a_500_that_tells_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: InferenceRequest, caller: Caller) -> None:
        raise ZeroDivisionError("secret detail")

    server = Server(BODY)
    record = await answered(server, broken)
    assert server.status == 500 and server.error()["code"] == "internal_error"
    assert b"secret" not in server.body and "secret detail" in caplog.text
    assert (record.status, record.ending) == (500, "failed")


# --- failures after the first byte --------------------------------------------------------------------------


async def test_a_stream_that_fails_ends_with_an_error_event_and_no_end_mark() -> None:
    async def breaking(request: InferenceRequest, caller: Caller) -> None:
        await caller.start(200, [])
        await caller.write(b"data: 1\n\n")
        raise UpstreamBroken("The engine closed the connection.")

    server = Server(STREAM)
    record = await answered(server, breaking)
    first, last, rest = server.body.split(b"\n\n")
    assert first == b"data: 1" and rest == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_broken"
    assert server.is_whole and b"[DONE]" not in server.body
    assert (record.status, record.ending, record.error_code) == (502, "upstream_error", "upstream_broken")


async def test_a_plain_reply_that_fails_half_way_is_cut_and_not_filled_with_an_event() -> None:
    async def breaking(request: InferenceRequest, caller: Caller) -> None:
        await caller.start(200, [(b"content-length", b"1000")])
        raise UpstreamBroken("cut")

    server = Server(BODY)
    record = await answered(server, breaking)
    assert len(server.sent) == 1 and not server.is_whole
    assert record.ending == "upstream_error"


# --- hang-ups, and the end of the process -------------------------------------------------------------------


class Busy:
    """A dispatcher that never ends; streams one event first if told to."""

    def __init__(self, *, starts: bool = False) -> None:
        self.entered = asyncio.Event()
        self.was_cancelled = False
        self._starts = starts

    async def __call__(self, request: InferenceRequest, caller: Caller) -> None:
        if self._starts:
            await caller.start(200, [])
            await caller.write(b"data: 1\n\n")
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def busy_with(server: Server, *, starts: bool = False) -> tuple[World, Busy, asyncio.Task[AccessRecord]]:
    busy = Busy(starts=starts)
    world = World(busy)
    task = asyncio.create_task(world.handle(server))
    await asyncio.wait_for(busy.entered.wait(), 5)
    return world, busy, task


@pytest.mark.parametrize("starts", [False, True])
async def test_a_caller_who_hangs_up_ends_the_work_and_gets_nothing_more(starts: bool) -> None:
    server = Server(STREAM)
    _, busy, task = await busy_with(server, starts=starts)
    sent = len(server.sent)
    server.hang_up()
    record = await asyncio.wait_for(task, 5)
    assert busy.was_cancelled and len(server.sent) == sent
    assert (record.status, record.ending, record.error_code) == (499, "client_gone", "client_closed_request")


async def test_a_caller_who_leaves_while_sending_is_recorded_as_gone() -> None:
    server = Server([BODY[:5], BODY[5:]])
    server._incoming.pop()
    server.hang_up()
    record = await answered(server)
    assert server.sent == []
    assert (record.status, record.ending) == (499, "client_gone")


async def test_the_drains_end_is_a_503_for_who_has_no_reply_yet() -> None:
    server = Server(STREAM)
    world, busy, task = await busy_with(server)
    world.runtime._end_all()
    record = await asyncio.wait_for(task, 5)
    assert busy.was_cancelled
    assert (server.status, server.error()["code"], server.headers[b"retry-after"]) == (503, "shutting_down", b"1")
    assert (record.status, record.error_code) == (503, "shutting_down")


async def test_the_drains_end_is_an_error_event_for_a_running_stream() -> None:
    server = Server(STREAM)
    world, _, task = await busy_with(server, starts=True)
    world.runtime._end_all()
    await asyncio.wait_for(task, 5)
    assert server.is_whole and b'"shutting_down"' in server.body


async def test_a_caller_who_leaves_while_it_is_told_of_the_end_is_no_failure_of_the_handler() -> None:
    server = Server(STREAM)
    world, _, task = await busy_with(server, starts=True)
    server.stalls_at = len(server.sent)
    world.runtime._end_all()
    await asyncio.wait_for(server.stalled.wait(), 5)
    (exchange,) = world.runtime.exchanges
    exchange.abandon()
    record = await asyncio.wait_for(task, 5)
    assert record.error_code == "shutting_down"


async def test_a_caller_is_told_when_the_server_is_made_to_stop_at_once() -> None:
    server = Server(STREAM)
    world, busy, task = await busy_with(server)
    task.cancel()
    record = await asyncio.wait_for(task, 5)
    assert busy.was_cancelled and record.error_code == "shutting_down" and not world.runtime.exchanges
    assert (server.status, server.error()["code"]) == (503, "shutting_down")


async def test_a_caller_that_stopped_reading_is_given_up_by_the_sweep() -> None:
    async def writing(request: InferenceRequest, caller: Caller) -> None:
        await caller.start(200, [])
        await caller.write(b"data: 1\n\n")

    server = Server(STREAM)
    server.stalls_at = 1
    world = World(writing)
    task = asyncio.create_task(world.handle(server))
    await asyncio.wait_for(server.stalled.wait(), 5)
    now = asyncio.get_running_loop().time()
    assert world.runtime.drop_stalled(now) == 0
    assert world.runtime.drop_stalled(now + world.runtime.config.gateway.timeouts.write_s + 1) == 1
    record = await asyncio.wait_for(task, 5)
    assert (record.status, record.ending) == (499, "client_gone")
