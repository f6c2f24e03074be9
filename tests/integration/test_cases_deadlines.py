"""Every wait ends: by which deadline, with which status or event, and with engine, slot and connection free."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from fakes.line import KEY, LIMITED, MESSAGES, Gateway, running_gateway, sha256
from fakes.scripted_upstream import (
    STREAM_HEAD,
    Peer,
    Received,
    ScriptedUpstream,
    chunk,
    deaf_listener,
    plain,
)
from fakes.stage import ANSWER, Answer, Stage, connected, event, head, reply_of, to_the_end
from fakes.waits import eventually

TIMEOUTS = {"connect_s": 0.5, "first_byte_s": 1, "gap_s": 1, "total_s": 3, "body_s": 1, "write_s": 1}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Line:
    """`chat` is served by `stage`, `well` by another one; `numb` reads nothing, `deaf` takes no
    connection, `late` falls back from it."""

    gateway: Gateway
    stage: Stage
    well: Stage
    numb: ScriptedUpstream

    async def check_free(self, ending: str, status: int) -> dict[str, Any]:
        """The record says how the request ended; the engine was hung up on, and the caller's only slot is free."""

        async def written() -> list[dict[str, Any]]:
            return [r for r in self.gateway.access_lines()[self.records :] if r["key_id"] == "one"]

        record: dict[str, Any] = (await eventually(written, "the access record is written"))[0]
        assert (record["ending"], record["status"], record["attempts"] <= 1) == (ending, status, True)
        await eventually(lambda: self.stage.open_connections == 0)
        self.stage.reset()
        assert (await self.gateway.chat(LIMITED)).status_code == 200
        return record

    records: int = 0


async def takes_nothing(_peer: Peer) -> None:
    await asyncio.sleep(3600)  # ended with the server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_line(tmp_path_factory: pytest.TempPathFactory, redis_process: Any) -> AsyncIterator[Line]:
    async with (
        Stage() as stage,
        Stage() as well,
        ScriptedUpstream(takes_nothing) as numb,
        deaf_listener() as deaf,
        running_gateway(
            tmp_path_factory.mktemp("deadlines"),
            redis_process.url,
            gateway={"timeouts": TIMEOUTS, "max_body_bytes": 40_000_000},
            keys={"test": {"sha256": sha256(KEY)}, "one": {"sha256": sha256(LIMITED), "limits": {"in_flight": 1}}},
            pools={
                "tiny": {"urls": [stage.url]},
                "well": {"urls": [well.url]},
                "deaf": {"urls": [deaf]},
                "numb": {"urls": [numb.url]},
            },
            routes={
                "chat": {"targets": [{"pool": "tiny"}]},
                "well": {"targets": [{"pool": "well"}]},
                "numb": {"targets": [{"pool": "numb"}]},
                "deaf": {"targets": [{"pool": "deaf"}]},
                "late": {"targets": [{"pool": "deaf"}], "fallback": ["well"]},
            },
        ) as gateway,
    ):
        yield Line(gateway, stage, well, numb)


@pytest_asyncio.fixture(loop_scope="module")
async def line(running_line: Line) -> Line:
    running_line.stage.reset()
    running_line.well.reset()
    running_line.records = await running_line.gateway.at_rest()
    return running_line


async def says_nothing(peer: Peer, _request: Received) -> None:
    await peer.closed()


def stops_after(*parts: bytes) -> Answer:
    async def answer(peer: Peer, _request: Received) -> None:
        for part in parts:
            await peer.send(part)
        await peer.closed()

    return answer


def goes_on(beginning: bytes, piece: bytes) -> Answer:
    """Never silent for long, and never at its end."""

    async def answer(peer: Peer, _request: Received) -> None:
        await peer.send(beginning)
        while True:
            await peer.send(piece)
            await asyncio.sleep(0.1)

    return answer


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
async def test_connect_that_hangs_holds_a_request_for_ever(line: Line, is_stream: bool) -> None:
    reply = await line.gateway.chat(LIMITED, model="deaf", stream=is_stream)
    assert (reply.status_code, reply.json()["error"]["code"]) in ((504, "upstream_timeout"), (503, "model_not_ready"))
    assert (await line.gateway.chat(LIMITED)).status_code == 200
    late = await line.gateway.chat(LIMITED, model="late", stream=is_stream)
    assert (late.status_code, late.headers["x-poolgate-pool"]) == (200, "well")


PLAIN_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"
SILENT: dict[str, Answer] = {
    "no head": says_nothing,
    "half a head": stops_after(b"HTTP/1.1 200 OK\r\ncontent-le"),
    "an interim head": stops_after(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a head that drips": goes_on(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
    "a head alone": stops_after(PLAIN_HEAD),
    "a stream's head alone": stops_after(STREAM_HEAD),
    "an error's head alone": stops_after(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 1000\r\n\r\n"),
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("answer", SILENT.values(), ids=SILENT)
async def test_engine_that_never_begins_holds_its_caller_and_a_slot(
    line: Line, answer: Answer, is_stream: bool
) -> None:
    line.stage.answer = answer
    reply = await line.gateway.chat(LIMITED, stream=is_stream)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "upstream_timeout")
    assert "first byte" in reply.json()["error"]["message"]
    assert len(line.stage.requests) == 1
    await line.check_free("upstream_error", 504)


async def test_engine_that_does_not_take_the_request_holds_its_caller(line: Line) -> None:
    long = [{"role": "user", "content": "x" * 30_000_000}]  # more than sockets hold
    reply = await line.gateway.chat(LIMITED, model="numb", messages=long)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "upstream_timeout")
    await line.check_free("upstream_error", 504)
    await eventually(lambda: line.numb.accepted == 1)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_silence_in_the_middle_is_waited_out_for_ever(line: Line, is_stream: bool) -> None:
    events = [event(content="one"), event(content="two")]
    line.stage.answer = (
        stops_after(STREAM_HEAD, *map(chunk, events)) if is_stream else stops_after(PLAIN_HEAD, ANSWER[:40])
    )
    reply = await line.gateway.chat(LIMITED, stream=is_stream)
    if is_stream:
        assert reply.status_code == 200 and reply.content.startswith(b"".join(events) + b"data: ")
        error = json.loads(reply.content.removeprefix(b"".join(events) + b"data: "))["error"]
    else:
        assert reply.status_code == 504
        error = reply.json()["error"]
    assert error["code"] == "upstream_timeout" and "gap" in error["message"]
    record = await line.check_free("upstream_error", 504)
    assert record["completion_tokens"] == (2 if is_stream else None)


ENDLESS: dict[str, tuple[int, Answer]] = {
    "events": (200, goes_on(STREAM_HEAD, chunk(event(content="x")))),
    "one event that never ends": (504, goes_on(STREAM_HEAD, chunk(b"x"))),
    "comments": (504, goes_on(STREAM_HEAD, chunk(b": ping\n\n"))),
    "plain": (504, goes_on(PLAIN_HEAD, b" ")),
}


@pytest.mark.parametrize(("status", "answer"), ENDLESS.values(), ids=ENDLESS)
async def test_reply_without_end_never_ends(line: Line, status: int, answer: Answer) -> None:
    line.stage.answer = answer
    reply = await line.gateway.chat(LIMITED, stream=answer is not ENDLESS["plain"][1])
    last = reply.content.rpartition(b"data: ")[2]
    error = json.loads(last)["error"]
    assert (error["code"], reply.status_code) == ("upstream_timeout", status)
    assert "total" in error["message"] and b"[DONE]" not in reply.content
    await line.check_free("upstream_error", 504)


async def test_what_comes_after_the_deadline_is_the_next_callers_reply(line: Line) -> None:
    async def late(peer: Peer, _request: Received) -> None:
        await asyncio.sleep(1.3)
        await peer.send(plain(ANSWER.replace(b"of-the-engine", b"of-the-request-before")))

    line.stage.answer = late
    assert (await line.gateway.chat(LIMITED)).status_code == 504
    line.stage.reset()
    for _ in range(5):
        assert (await line.gateway.chat(LIMITED)).json()["id"] == "of-the-engine"
        await asyncio.sleep(0.1)


async def test_one_hung_engine_stalls_the_whole_gateway(
    line: Line, tmp_path_factory: pytest.TempPathFactory, redis_process: Any
) -> None:
    """99 requests wait for an engine that never answers, another model answers meanwhile; all end by themselves."""
    line.stage.answer = says_nothing
    async with running_gateway(
        tmp_path_factory.mktemp("hung"),
        redis_process.url,
        gateway={"timeouts": {"first_byte_s": 6}},
        pools={"tiny": {"urls": [line.stage.url]}, "well": {"urls": [line.well.url]}},
        routes={"chat": {"targets": [{"pool": "tiny"}]}, "well": {"targets": [{"pool": "well"}]}},
    ) as gateway:
        stuck = [asyncio.create_task(gateway.chat(stream=i % 2 == 0)) for i in range(99)]
        await eventually(lambda: len(line.stage.requests) == 99)
        assert {(await gateway.chat(model="well")).status_code for _ in range(10)} == {200}
        assert not any(task.done() for task in stuck)
        assert {reply.status_code for reply in await asyncio.gather(*stuck)} == {504}
        await eventually(lambda: line.stage.open_connections == 0)
        line.stage.reset()
        assert (await gateway.chat()).status_code == 200


# --- the caller -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
async def test_upload_that_drips_holds_its_connection_for_ever(line: Line, opening: bytes) -> None:
    """Never silent for `body_s`, and not whole after `total_s`."""
    piece = b"x" if b"Length" in opening else b"1\r\nx\r\n"
    async with asyncio.timeout(15), connected(line.gateway) as (reader, writer):
        writer.write(head("/v1/chat/completions", opening, key=LIMITED))
        answer = asyncio.create_task(to_the_end(reader))
        while not answer.done():
            writer.write(piece)
            await asyncio.wait({answer}, timeout=0.2)
        reply = reply_of(await answer)
    assert (reply.status, reply.error()["code"]) == (408, "request_timeout")
    assert "not whole" in reply.error()["message"]
    assert line.stage.requests == []
    await line.check_free("refused", 408)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_caller_that_reads_nothing_holds_engine_slot_and_memory(line: Line, is_stream: bool) -> None:
    big = ANSWER[:-1] + b',"x":"' + b"y" * 20_000_000 + b'"}'
    line.stage.answer = (
        goes_on(STREAM_HEAD, chunk(event(content="x" * 4_000_000))) if is_stream else stops_after(plain(big))
    )
    body = json.dumps({"model": "chat", "messages": MESSAGES, "stream": is_stream}).encode()
    before = len(line.gateway.log.read_text())
    host, port = line.gateway.url.removeprefix("http://").split(":")
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.connect((host, int(port)))
        caller.sendall(head("/v1/chat/completions", b"Content-Length: %d" % len(body), key=LIMITED) + body)

        async def is_given_up() -> bool:
            return "gave up a caller" in line.gateway.log.read_text()[before:]

        await eventually(is_given_up, "the caller is cut")
        caller.setblocking(False)
        loop = asyncio.get_running_loop()
        got = 0
        try:
            while piece := await asyncio.wait_for(loop.sock_recv(caller, 1 << 20), 10):
                got += len(piece)
        except ConnectionError:
            pass
        assert got < len(big)
    await line.check_free("client_gone" if is_stream else "completed", 499 if is_stream else 200)
