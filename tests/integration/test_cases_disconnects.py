"""Callers that leave, in every phase and on every path: a real gateway has to let go of all that it held for them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from fakes.bodies import FORM_TYPE, json_fields, transcription
from fakes.caller import Caller
from fakes.line import KEY, MESSAGES
from fakes.netns import caller_host
from fakes.ruled_line import ONE_AT_A_TIME, HangUp, RuledLine, ruled_line, silent_after, text, whole
from fakes.scripted_upstream import STREAM_HEAD, Peer, Received, chunk
from fakes.waits import eventually

from gateway.domain.endpoint import Endpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
FIFTY_AT_ONCE = "sk-test-fifty-at-once-0123"
WITHIN_S = 10.0
CHAT = {"model": "chat", "messages": MESSAGES, "stream": True}
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
# what the upstream sends before it falls silent
STREAM_PHASES = {"before the head": b"", "no body yet": STREAM_HEAD, "mid stream": STREAM_HEAD + chunk(text("Hi."))}
PLAIN_PHASES = {"before the head": b"", "no body yet": PLAIN_HEAD, "mid body": PLAIN_HEAD + b'{"object"'}


@dataclass(frozen=True)
class Leaving:
    """A request, and how far its answer is when its caller leaves."""

    endpoint: Endpoint
    stream: bool
    phase: str
    sent: bytes

    def __str__(self) -> str:
        return f"{self.endpoint.value}-{'stream' if self.stream else 'plain'}-{self.phase}"


EVERY_WAY = [
    *(Leaving(e, True, *p) for e in Endpoint if e.rules.streams for p in STREAM_PHASES.items()),
    *(Leaving(e, False, *p) for e in Endpoint for p in PLAIN_PHASES.items()),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def line_of_file(tmp_path_factory: pytest.TempPathFactory, redis_process: Any) -> AsyncIterator[RuledLine]:
    folder = tmp_path_factory.mktemp("disconnects")
    async with ruled_line(folder, redis_process.url, limits={FIFTY_AT_ONCE: {"in_flight": 50}}) as line:
        yield line


@pytest_asyncio.fixture(loop_scope="module")
async def line(line_of_file: RuledLine) -> RuledLine:
    await line_of_file.skip_records()
    return line_of_file


async def slot_is_free(line: RuledLine, key: str = ONE_AT_A_TIME) -> None:
    line.answer = whole

    async def is_admitted() -> bool:
        status = (await line.gateway.chat(key)).status_code
        assert (await line.next_record())["status"] == status
        return status == 200

    await eventually(is_admitted, "the slot is given back")


async def no_connection_is_used(line: RuledLine) -> None:
    async def all_closed() -> bool:
        return line.upstream.open_connections == 0

    await eventually(all_closed, "the upstream sees its connections closed")


async def ask(caller: Caller, way: Leaving, key: str) -> None:
    if way.endpoint.rules.is_form:
        body: Any = transcription("chat", **({"stream": "true"} if way.stream else {}))
        await caller.ask(way.endpoint.value, body, key=key, headers=[("content-type", FORM_TYPE.decode())])
    else:
        fields = json_fields(way.endpoint, "chat", **({"stream": way.stream} if way.endpoint.rules.streams else {}))
        await caller.ask(way.endpoint.value, fields, key=key)


async def leave(line: RuledLine, way: Leaving, *, by_reset: bool, key: str = ONE_AT_A_TIME) -> None:
    """Asks, leaves in the phase, and sees to it that nothing is left of the request."""
    asked = asyncio.Event()
    line.answer = silent_after(way.sent, asked)
    async with Caller(line.gateway.url) as caller:
        await ask(caller, way, key)
        async with asyncio.timeout(WITHIN_S):
            await asked.wait()
        if way.phase == "mid stream":
            await caller.read_until(b"Hi.")
        if by_reset:
            caller.reset()
        else:
            caller.close()
    await no_connection_is_used(line)
    record = await line.next_record()
    assert (record["path"], record["ending"], record["status"]) == (way.endpoint.value, "client_gone", 499)
    await line.at_rest()


# --- every path, every phase ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", EVERY_WAY, ids=str)
async def test_no_engine_works_on_for_a_caller_who_left(line: RuledLine, way: Leaving) -> None:
    await kept_connections_are_closed(line)
    await leave(line, way, by_reset=EVERY_WAY.index(way) % 2 == 0)
    await slot_is_free(line)


@pytest.mark.parametrize("kb", [30, 70, 100, 300])
async def test_a_caller_with_a_long_prompt_who_left_is_noticed(line: RuledLine, kb: int) -> None:
    """His body comes faster than it is asked for, so that the gateway stops to read for a moment."""
    await kept_connections_are_closed(line)
    asked = asyncio.Event()
    line.answer = silent_after(b"", asked)
    async with Caller(line.gateway.url) as caller:
        prompt = [{"role": "user", "content": "x" * (kb * 1000)}]
        await caller.ask("/v1/chat/completions", CHAT | {"messages": prompt}, key=ONE_AT_A_TIME)
        async with asyncio.timeout(WITHIN_S):
            await asked.wait()
        caller.close()
    await no_connection_is_used(line)
    assert (await line.next_record())["ending"] == "client_gone"
    await slot_is_free(line)


@pytest.mark.parametrize("kb", [60, 70, 1000])
@pytest.mark.parametrize("is_reset", [False, True], ids=["closes", "resets"])
async def test_a_caller_who_left_is_noticed_with_a_long_prompt_pipelined_behind(
    line: RuledLine, kb: int, is_reset: bool
) -> None:
    await kept_connections_are_closed(line)
    asked = asyncio.Event()
    line.answer = silent_after(b"", asked)
    behind = CHAT | {"messages": [{"role": "user", "content": "x" * (kb * 1000)}]}
    async with Caller(line.gateway.url) as caller:
        await caller.ask("/v1/chat/completions", CHAT, key=ONE_AT_A_TIME)
        async with asyncio.timeout(WITHIN_S):
            await asked.wait()
        await caller.ask("/v1/chat/completions", behind, key=ONE_AT_A_TIME)
        caller.reset() if is_reset else caller.close()
    await no_connection_is_used(line)
    assert (await line.next_record())["ending"] == "client_gone"
    await slot_is_free(line)


async def kept_connections_are_closed(line: RuledLine) -> None:
    """Those of the requests before, which would wait for their next one."""

    async def close(peer: Peer, request: Received) -> None:
        await whole(peer, request)
        raise HangUp

    line.answer = close
    async with asyncio.timeout(WITHIN_S):
        while line.upstream.open_connections:
            await line.gateway.chat()
            await line.next_record()


@pytest.mark.parametrize("comments_s", [0, 0.1], ids=["no comments", "comments"])
@pytest.mark.parametrize("has_traces", [False, True], ids=["no traces", "traces"])
async def test_no_feature_hides_a_disconnect(
    tmp_path: Path, redis_url: str, has_traces: bool, comments_s: float
) -> None:
    exported = 0

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal exported
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
                exported += 1
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    collector = await asyncio.start_server(collect, "127.0.0.1", 0)
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.sockets[0].getsockname()[1]}",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    async with (
        collector,
        ruled_line(tmp_path, redis_url, env=env if has_traces else {}, sse_keepalive_s=comments_s) as line,
    ):
        for way in EVERY_WAY:
            if way.endpoint is not Endpoint.CHAT:
                continue
            for key in (KEY, ONE_AT_A_TIME):
                await leave(line, way, by_reset=key == KEY, key=key)
            if way.stream and comments_s:  # once more, after a comment has opened the stream
                await leave_after_a_comment(line, way)
        await slot_is_free(line)
        await kept_connections_are_closed(line)
    assert bool(exported) == has_traces


async def leave_after_a_comment(line: RuledLine, way: Leaving) -> None:
    line.answer = silent_after(way.sent, asyncio.Event())
    async with Caller(line.gateway.url) as caller:
        await ask(caller, way, ONE_AT_A_TIME)
        await caller.read_until(b": keep-alive")
        caller.reset()
    await no_connection_is_used(line)
    assert (await line.next_record())["ending"] == "client_gone"
    await line.at_rest()


# --- many at once ---------------------------------------------------------------------------------------------------


async def test_five_hundred_torn_streams_leave_nothing_open(line: RuledLine) -> None:
    process = psutil.Process(line.gateway.pid)
    await kept_connections_are_closed(line)
    files: list[int] = []
    for _ in range(11):  # the first wave only warms up
        line.answer = silent_after(STREAM_HEAD + chunk(text("Hi.")), asyncio.Event())
        async with contextlib.AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(Caller(line.gateway.url)) for _ in range(50)]
            for caller in callers:
                await caller.ask("/v1/chat/completions", CHAT, key=FIFTY_AT_ONCE)
            await asyncio.gather(*(caller.read_until(b"Hi.") for caller in callers))
            assert line.upstream.open_connections == 50
            assert (await line.gateway.chat(FIFTY_AT_ONCE)).status_code == 429  # all slots are taken
            assert (await line.next_record())["error_code"] == "rate_limit_exceeded"
            for caller in callers:
                caller.reset()
        await no_connection_is_used(line)
        await line.at_rest()
        assert {record["ending"] for record in await line.next_records(50)} == {"client_gone"}

        async def files_are_closed() -> bool:
            return not files or process.num_fds() <= files[0]

        await eventually(files_are_closed, "the open files are back to the start")
        files.append(process.num_fds())
        await slot_is_free(line, FIFTY_AT_ONCE)
        await kept_connections_are_closed(line)


@pytest.mark.parametrize("first", ["signal", "reset"])
async def test_a_drain_on_top_of_a_disconnect_ends_in_time_and_leaves_nothing(
    tmp_path: Path, redis_url: str, first: str
) -> None:
    asked = asyncio.Event()
    async with ruled_line(tmp_path, redis_url, drain_s=20) as line, contextlib.AsyncExitStack() as stack:
        line.answer = silent_after(STREAM_HEAD + chunk(text("Hi.")), asked)
        callers = [await stack.enter_async_context(Caller(line.gateway.url)) for _ in range(10)]
        for caller in callers:
            await caller.ask("/v1/chat/completions", CHAT)
        await asyncio.gather(*(caller.read_until(b"Hi.") for caller in callers))
        if first == "signal":
            line.gateway.process.send_signal(signal.SIGTERM)
        for caller in callers:
            caller.reset()
        if first == "reset":
            line.gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(line.gateway.process.wait(), 15) == 0  # long before drain_s
        await no_connection_is_used(line)
        assert {record["ending"] for record in await line.next_records(10)} == {"client_gone"}
        assert "Traceback" not in line.gateway.log.read_text()


# --- gone without a word --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("upstream", ["streams on", "falls silent"])
async def test_a_caller_whose_network_is_gone_is_not_streamed_to_for_good(
    tmp_path: Path, redis_url: str, upstream: str
) -> None:
    """In silence it is the gateway's own comments that nobody confirms."""
    asked = asyncio.Event()

    async def stream_on(peer: Peer, request: Received) -> None:
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(text("Hi.")))
            await asyncio.sleep(0.02)

    silent = silent_after(STREAM_HEAD + chunk(text("Hi.")), asked)
    async with (
        caller_host() as host,
        ruled_line(
            tmp_path,
            redis_url,
            host="0.0.0.0",
            sse_keepalive_s=0 if upstream == "streams on" else 0.3,
            timeouts={"write_s": 2, "gap_s": 300, "first_byte_s": 300},
        ) as line,
    ):
        line.answer = stream_on if upstream == "streams on" else silent
        port = int(line.gateway.url.rpartition(":")[2])
        async with host.caller(port, "/v1/chat/completions", CHAT, KEY, until=b"Hi."):
            assert line.upstream.open_connections == 1
            await host.cut_off()
            await no_connection_is_used(line)
            record = await line.next_record()
            assert (record["ending"], record["status"]) == ("client_gone", 499)
            await line.at_rest()
