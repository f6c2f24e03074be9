"""Front on a transport in memory: whose turn it is, what a client may send, and when a connection ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
from fakes.client import KEY, Client, Timers, request_pieces

from gateway.domain.errors import BadRequest
from gateway.edge import front
from gateway.edge.context import EARLY_BODY_BYTES, Exchange
from gateway.edge.front import HEAD_BYTES
from gateway.edge.lane import Handler
from gateway.edge.timers import HEAD_S, KEEP_ALIVE_S
from gateway.edge.turns import MAX_PIPELINED

CHAT = "/v1/chat/completions"


class Work:
    """A handler that keeps its exchanges and answers each of them when it is told to."""

    def __init__(self, *, reads: bool = False) -> None:
        self.exchanges: list[Exchange] = []
        self.bodies: list[bytes] = []
        self.cancelled = 0
        self._reads = reads
        self._answered: list[asyncio.Event] = []

    @property
    def handlers(self) -> dict[bytes, Handler]:
        return {CHAT.encode(): self}

    async def __call__(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        answer = asyncio.Event()
        self._answered.append(answer)
        try:
            if self._reads:
                self.bodies.append(await exchange.read_body(1 << 30, 60, 60))
            await answer.wait()
            exchange.reply(200, [], exchange.request_id.encode())
        except asyncio.CancelledError:
            self.cancelled += 1
        finally:
            exchange.close()

    async def answer(self, number: int) -> None:
        self._answered[number].set()
        await turns()


async def at_once(exchange: Exchange) -> None:
    exchange.reply(200, [], exchange.request_id.encode())
    exchange.close()


AT_ONCE: dict[bytes, Handler] = {CHAT.encode(): at_once}


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """What is not proxied: answers with the path as it got it."""
    body = scope["path"].encode() + b"?" + scope["query_string"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def turns() -> None:
    """Lets what is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


def request(
    id_: str = "", body: bytes = b"{}", *, path: str = CHAT, method: str = "POST", version: str = "1.1"
) -> bytes:
    headers = [KEY, *([(b"x-request-id", id_.encode())] if id_ else [])]
    (data,) = request_pieces(body, method, path, headers, version)
    return data


def connected(handlers: dict[bytes, Handler], timers: Timers | None = None, method: str = "POST") -> Client:
    client = Client(method=method)
    client.connect(handlers, app=app, timers=timers)
    return client


# --- which paths are proxied ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        CHAT,
        CHAT + "/",
        CHAT + "?",
        CHAT + "?a=b&c=/x/",
        CHAT + "/?a=b",
        "/v1/chat%2Fcompletions",
        "/v1/%63hat/completions?x",
        "http://gateway.test:8080" + CHAT,
        "http://gateway.test" + CHAT + "/?a=b",
    ],
)
async def test_a_proxied_path_is_known_however_it_is_written(path: str) -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a", path=path))
    await turns()
    assert len(work.exchanges) == 1
    await work.answer(0)
    assert client.body == b"a"


@pytest.mark.parametrize(
    "path",
    ["/", "/v1/chat/completions/batch", "/v1/chat", "/v1/Chat/completions", "/x" + CHAT, "//v1/chat/completions"],
)
async def test_every_other_path_is_the_apps(path: str) -> None:
    client = connected(Work().handlers)
    client.send(request(path=path + "?q=1", method="GET", body=b""))
    await client.idle()
    assert client.body == path.encode() + b"?q=1"


@pytest.mark.parametrize("target", ["*", "http://", "http://[", "/\xff", "ftp:x"])
async def test_a_target_that_is_no_path_is_answered_and_ends_no_more_than_its_connection(target: str) -> None:
    client = connected(Work().handlers, method="OPTIONS")
    client.send(b"OPTIONS %b HTTP/1.1\r\nHost: x\r\n\r\n" % target.encode("latin-1"))
    await client.idle()
    await turns()
    assert client.status in (200, 400)


async def test_a_head_request_to_a_proxied_path_gets_no_body() -> None:
    client = connected(AT_ONCE, method="HEAD")
    client.send(request("a", b"", method="HEAD") * 2)
    await client.idle()
    assert [reply.headers[b"content-length"] for reply in client.replies()] == [b"1", b"1"]


async def test_header_names_are_small_and_trailers_are_no_headers() -> None:
    work = Work(reads=True)
    client = connected(work.handlers)
    client.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Session-ID: A\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\nX-Api-Key: sk-late\r\nX-Session-Id: B\r\n\r\n"
    )
    await turns()
    (exchange,) = work.exchanges
    assert (b"x-session-id", b"A") in exchange.headers
    assert exchange.header(b"x-api-key") is None and b"sk-late" not in dict(exchange.headers).values()
    assert work.bodies == [b"{}"]


# --- one after the other ----------------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_their_order_one_at_a_time() -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a") + request("b") + request("c"))
    await turns()
    assert len(work.exchanges) == 1 and client.line.is_reading, "else nobody would notice that the caller leaves"
    for i, id_ in enumerate("abc"):
        assert len(work.exchanges) == i + 1
        await work.answer(i)
        assert client.replies()[-1].body == id_.encode()
    assert client.line.is_reading and not client.line.is_closed
    assert client.state.total_requests == 3


async def test_proxied_and_other_paths_keep_their_order_too() -> None:
    client = connected(AT_ONCE)
    client.send(request("a") + request(path="/x", method="GET", body=b"") + request("b") + request(path="/y"))
    await client.idle()
    assert [reply.body for reply in client.replies()] == [b"a", b"/x?", b"b", b"/y?"]


async def test_a_body_that_comes_in_pieces_behind_another_request_reaches_its_own_exchange() -> None:
    work = Work(reads=True)
    client = connected(work.handlers)
    second = request("b", b"0123456789")
    client.send(request("a", b"first") + second[:-10])
    await turns()
    await work.answer(0)
    for i in range(10):
        client.send(second[len(second) - 10 + i :][:1])
        await turns()
    await work.answer(1)
    assert work.bodies == [b"first", b"0123456789"]
    assert [reply.body for reply in client.replies()] == [b"a", b"b"]


async def test_of_a_heap_of_pipelined_requests_the_first_are_answered_and_the_last_reply_says_so() -> None:
    client = connected(AT_ONCE)
    client.send(request() * (MAX_PIPELINED + 20))
    await client.idle()
    replies = client.replies()
    assert len(replies) == MAX_PIPELINED + 1 and client.line.is_closed
    assert [reply.headers.get(b"connection") for reply in replies[-2:]] == [None, b"close"]


async def test_a_caller_who_leaves_with_a_request_pipelined_behind_is_noticed() -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a"))
    client.send(request("b"))
    await turns()
    assert client.line.is_reading
    client.hang_up()
    await client.idle()
    assert work.cancelled == 1 and len(work.exchanges) == 1


async def test_as_many_pipelined_requests_as_are_allowed_are_all_answered() -> None:
    client = connected(AT_ONCE)
    client.send(request() * (MAX_PIPELINED + 1))
    await client.idle()
    assert len(client.replies()) == MAX_PIPELINED + 1


async def test_garbage_behind_a_request_ends_the_connection_after_its_reply() -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a") + b"\x00 garbage\r\n\r\n")
    await turns()
    assert not client.line.is_closed
    await work.answer(0)
    (reply,) = client.replies()
    assert (reply.body, reply.headers[b"connection"]) == (b"a", b"close")
    assert client.line.is_closed and work.cancelled == 0


@pytest.mark.parametrize("size", [b"zz", b"0x4d", b"-5", b"1" * 30])
async def test_a_body_whose_chunks_are_broken_is_the_requests_fault_and_answered(size: bytes) -> None:
    found: list[Exception] = []

    async def reading(exchange: Exchange) -> None:
        try:
            await exchange.read_body(1 << 20, 60, 60)
        except BadRequest as exc:
            found.append(exc)
            exchange.reply(400, [], b"no")
        exchange.close()

    client = connected({CHAT.encode(): reading})
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    client.send(head + size + b"\r\n{}\r\n")
    await client.idle()
    assert client.status == 400 and client.headers[b"connection"] == b"close" and len(found) == 1


@pytest.mark.parametrize("rest", [b"a" * 70_000, b"x: y\r\n" * 12_000], ids=["one", "many"])
async def test_trailers_without_end_are_cut_off(rest: bytes) -> None:
    client = connected(AT_ONCE)
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.send(b"2\r\n{}\r\n0\r\nx-a: ")
    for start in range(0, len(rest), 1000):
        if client.line.is_closed:
            break
        client.send(rest[start : start + 1000])
    assert client.line.is_closed


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


@pytest.mark.parametrize("reads", ["one", "head first", "bytes"])
async def test_the_wish_for_another_protocol_loses_no_body_and_starts_no_other_request(reads: str) -> None:
    inner = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(inner)
    whole = head + inner + request("b")
    work = Work(reads=True)
    client = connected(work.handlers)
    pieces = [whole[i : i + 1] for i in range(len(whole))]
    cuts = {"one": [whole], "head first": [head, whole[len(head) :]], "bytes": pieces}
    for data in cuts[reads]:
        client.send(data)
    await turns()
    await work.answer(0)
    await work.answer(1)
    assert work.bodies == [inner, b"{}"]
    assert len(client.replies()) == 2 and not client.line.is_closed


async def test_a_proxys_connect_is_refused() -> None:
    client = connected(AT_ONCE)
    client.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n")
    assert client.status == 400 and client.line.is_closed


@pytest.mark.parametrize(("size", "status"), [(HEAD_BYTES - 200, 200), (HEAD_BYTES + 10, 431)])
async def test_a_head_that_comes_in_one_read_is_measured_without_what_is_behind_it(size: int, status: int) -> None:
    client = connected(AT_ONCE)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nx-a: " + b"a" * size + b"\r\ncontent-length: 9000\r\n\r\n"
    client.send(head + b"x" * 9000)
    await client.idle()
    assert client.status == status


# --- the body ---------------------------------------------------------------------------------------------------


async def test_a_body_behind_an_early_refusal_is_dropped_and_the_next_request_heard() -> None:
    client = connected(AT_ONCE)
    first = request("a", b"x" * 10_000)
    client.send(first[:-9_000])
    await client.idle()
    assert client.body == b"a" and not client.line.is_closed
    client.send(first[-9_000:-100])
    client.send(first[-100:] + request("b"))
    await client.idle()
    assert [reply.body for reply in client.replies()] == [b"a", b"b"]


async def test_an_upload_is_held_back_until_its_handler_asks_for_it() -> None:
    asked = asyncio.Event()
    bodies: list[bytes] = []

    async def slow(exchange: Exchange) -> None:
        await asked.wait()
        bodies.append(await exchange.read_body(1 << 30, 60, 60))
        await at_once(exchange)

    client = connected({CHAT.encode(): slow})
    data = request("a", b"x" * (4 * EARLY_BODY_BYTES))
    client.send(data[: 2 * EARLY_BODY_BYTES])
    await turns()
    assert not client.line.is_reading
    asked.set()
    await turns()
    assert client.line.is_reading
    client.send(data[2 * EARLY_BODY_BYTES :])
    await client.idle()
    assert bodies == [b"x" * (4 * EARLY_BODY_BYTES)]


async def test_an_upload_that_was_held_back_when_it_was_refused_is_taken_and_dropped() -> None:
    work = Work()
    client = connected(work.handlers)
    data = request("a", b"x" * (4 * EARLY_BODY_BYTES))
    client.send(data[: 2 * EARLY_BODY_BYTES])
    assert not client.line.is_reading
    await turns()
    await work.answer(0)
    assert client.line.is_reading
    client.send(data[2 * EARLY_BODY_BYTES :] + request("b"))
    await turns()
    assert len(work.exchanges) == 2


async def test_a_caller_who_waits_for_a_word_before_its_body_gets_it_once() -> None:
    work = Work(reads=True)
    client = connected(work.handlers)
    client.send(b"POST %b HTTP/1.1\r\nHost: x\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n" % CHAT.encode())
    await turns()
    assert [reply.status for reply in client.replies()] == [100]
    client.send(b"{")
    client.send(b"}")
    await turns()
    await work.answer(0)
    assert [reply.status for reply in client.replies()] == [100, 200]
    client.send(request("b"))
    await turns()
    assert [reply.status for reply in client.replies()] == [100, 200], "only the first one asked"


# --- keep-alive -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"", b"Connection: keep-alive\r\n", b"Connection: x-hop\r\n"])
async def test_a_connection_serves_request_after_request(more: bytes) -> None:
    client = connected(AT_ONCE)
    for _ in range(3):
        client.send(b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: 0\r\n\r\n" % (CHAT.encode(), more))
        await client.idle()
    assert len(client.replies()) == 3 and not client.line.is_closed
    assert all(b"connection" not in reply.headers for reply in client.replies())


@pytest.mark.parametrize(
    ("version", "more"),
    [(b"1.1", b"Connection: close\r\n"), (b"1.0", b""), (b"1.0", b"Connection: keep-alive\r\n")],
    ids=["close", "1.0", "1.0 keep-alive"],
)
async def test_a_connection_that_is_not_to_be_kept_is_closed_behind_its_reply(version: bytes, more: bytes) -> None:
    client = connected(AT_ONCE)
    client.send(b"POST %b HTTP/%b\r\nHost: x\r\n%bContent-Length: 0\r\n\r\n" % (CHAT.encode(), version, more))
    await client.idle()
    assert client.is_whole and client.headers[b"connection"] == b"close"
    assert client.line.is_closed and not client.line.was_cut


async def test_what_comes_behind_a_request_that_closes_is_not_answered() -> None:
    client = connected(AT_ONCE)
    client.send(request("a").replace(b"Host: x", b"Host: x\r\nConnection: close") + request("b"))
    await client.idle()
    assert client.body == b"a" and client.line.is_closed


async def test_an_idle_connection_is_closed_after_its_time_and_not_before() -> None:
    timers = Timers()
    client = connected(AT_ONCE, timers)
    for _ in range(3):
        timers.advance(KEEP_ALIVE_S - 1 if client.line.written else HEAD_S - 1)
        assert not client.line.is_closed
        client.send(request())
        await client.idle()
    timers.advance(KEEP_ALIVE_S - 1)
    assert not client.line.is_closed
    timers.advance(2)
    assert client.line.is_closed and not client.line.was_cut


async def test_a_long_reply_is_no_idleness() -> None:
    timers, work = Timers(), Work()
    client = connected(work.handlers, timers)
    client.send(request("a"))
    await turns()
    await work.answer(0)
    client.send(request("b"))
    await turns()
    timers.advance(10 * KEEP_ALIVE_S)
    assert not client.line.is_closed
    await work.answer(1)
    timers.advance(KEEP_ALIVE_S - 1)
    assert not client.line.is_closed
    timers.advance(2)
    assert client.line.is_closed


async def test_idleness_counts_again_behind_a_body_that_was_dropped_when_the_idle_timer_went_off() -> None:
    timers = Timers()
    client = connected(AT_ONCE, timers)
    client.send(request("a"))
    await client.idle()
    timers.advance(KEEP_ALIVE_S - 1)
    late = request("b", b"x" * 100)
    client.send(late[:-50])  # answered before its body is there
    await client.idle()
    timers.advance(2)
    client.send(late[-50:])
    timers.advance(2 * KEEP_ALIVE_S)
    assert client.line.is_closed


# --- heads that are too long or never come ----------------------------------------------------------------------


@pytest.mark.parametrize("begin", [b"", b"POST /v1/chat", b"\r\n", b"POST / HTTP/1.1\r\nX-Slow: "])
async def test_a_head_that_never_comes_is_not_waited_for(begin: bytes) -> None:
    timers = Timers()
    client = connected(AT_ONCE, timers)
    if begin:
        client.send(begin)
    timers.advance(HEAD_S - 0.1)
    assert not client.line.is_closed
    timers.advance(0.2)
    assert client.line.is_closed and not client.line.written


async def test_a_drip_does_not_put_off_the_end_of_a_head() -> None:
    timers = Timers()
    client = connected(AT_ONCE, timers)
    client.send(request())
    await client.idle()
    timers.advance(20)
    for byte in b"POST /aaaaaaaaaaaaaaa":
        if client.line.is_closed:
            break
        client.send(bytes([byte]))
        timers.advance(1)
    assert client.line.is_closed


async def test_the_time_for_a_pipelined_head_counts_from_the_reply_before_it() -> None:
    timers, work = Timers(), Work()
    client = connected(work.handlers, timers)
    client.send(request("a"))
    client.send(b"POST /v1/ch")
    await turns()
    timers.advance(5 * HEAD_S)
    assert not client.line.is_closed
    await work.answer(0)
    timers.advance(2 * HEAD_S)
    assert client.line.is_closed and client.body == b"a"


async def test_a_body_that_nobody_reads_is_not_taken_for_ever() -> None:
    timers = Timers()
    client = connected(AT_ONCE, timers)
    data = request("a", b"x" * 1000)
    client.send(data[:-900])
    await client.idle()
    for i in range(9):
        client.send(data[-900 + i :][:1])
        timers.advance(1)
    assert not client.line.is_closed
    timers.advance(2)
    assert client.line.is_closed


async def refuse(exchange: Exchange) -> None:
    exchange.reply(413, [(b"connection", b"close")], b"too large")
    exchange.close()


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_caller_who_still_sends_is_not_reset_before_it_has_read_its_last_reply(leaves: bool) -> None:
    timers = Timers()
    client = connected({CHAT.encode(): refuse}, timers)
    data = request("a", b"x" * (4 * EARLY_BODY_BYTES))
    client.send(data[: 2 * EARLY_BODY_BYTES])
    await client.idle()
    assert client.status == 413 and client.line.has_ended and client.line.is_reading
    client.send(data[2 * EARLY_BODY_BYTES :] + request("b") + b"\x00garbage")
    await turns()
    assert client.state.total_requests == 1 and client.is_whole and not client.line.is_closed
    if leaves:
        client.hang_up()
    else:
        timers.advance(HEAD_S + 0.1)
    assert client.line.is_closed and not client.line.was_cut


@pytest.mark.parametrize("piece", [1000, 50_000])
async def test_a_head_without_end_is_refused(piece: int) -> None:
    client = connected(AT_ONCE)
    client.send(b"POST / HTTP/1.1\r\nX-Long: ")
    while not client.line.is_closed:
        assert not client.line.written and client.state.total_requests == 0
        client.send(b"a" * piece)
        assert client.front._head_bytes <= HEAD_BYTES + piece
    reply = client.reply
    assert (reply.status, reply.error()["code"]) == (431, "request_head_too_large")
    assert reply.headers[b"connection"] == b"close"
    assert reply.headers[b"x-poolgate-error-source"] == b"client"
    assert reply.headers[b"x-request-id"].startswith(b"req-")


async def test_a_body_does_not_count_as_a_head() -> None:
    work = Work(reads=True)
    client = connected(work.handlers)
    data = request("a", b"x" * (4 * HEAD_BYTES))
    for start in range(0, len(data), 10_000):
        client.send(data[start : start + 10_000])
        await asyncio.sleep(0)
    await turns()
    await work.answer(0)
    assert client.status == 200 and len(work.bodies[0]) == 4 * HEAD_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff no http\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_answered_in_the_error_envelope(data: bytes) -> None:
    client = connected(Work().handlers)
    client.send(data)
    await turns()
    replies = client.replies()
    assert client.line.is_closed
    if replies:
        assert (replies[-1].status, replies[-1].error()["code"]) == (400, "invalid_request")


# --- a client that does not read --------------------------------------------------------------------------------


async def streaming(client: Client, write_s: float, timers: Timers) -> Exchange:
    work = Work()
    client.connect(work.handlers, write_s=write_s, timers=timers)
    client.send(request("a"))
    await turns()
    (exchange,) = work.exchanges
    exchange.start(200, [])
    exchange.write(b"1")
    return exchange


async def test_a_client_that_takes_nothing_for_too_long_is_cut() -> None:
    timers, client = Timers(), Client()
    exchange = await streaming(client, 7, timers)
    client.stop_reading()
    assert not exchange.write(b"2")
    timers.advance(6.9)
    assert not client.line.is_closed
    timers.advance(0.1)
    await client.idle()
    assert client.line.was_cut and exchange.is_gone


async def test_a_client_that_reads_on_in_time_is_not_cut() -> None:
    timers, client = Timers(), Client()
    exchange = await streaming(client, 7, timers)
    room: list[int] = []
    exchange.on_room = lambda: room.append(1)
    for _ in range(5):
        client.stop_reading()
        timers.advance(6)
        client.read_on()
        timers.advance(6)
    assert not client.line.is_closed and len(room) == 5
    assert exchange.write(b"2")


# --- a client that leaves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["reads its body", "works", "streams", "waits for room"])
async def test_a_client_that_leaves_ends_the_work_in_every_state(state: str) -> None:
    cancelled = asyncio.Event()

    async def work(exchange: Exchange) -> None:
        try:
            if state == "reads its body":
                await exchange.read_body(1000, 60, 60)
            elif state in ("streams", "waits for room"):
                exchange.start(200, [])
                exchange.write(b"1")
                if state == "waits for room":
                    client.stop_reading()
                    await exchange.drained()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert exchange.is_gone
            cancelled.set()
            exchange.write(b"too late")
            raise
        finally:
            exchange.close()

    client = connected({CHAT.encode(): work})
    data = request("a", b"0123456789")
    client.send(data[:-5] if state == "reads its body" else data)
    await turns()
    before = bytes(client.line.written)
    client.hang_up()
    await client.idle()
    assert cancelled.is_set() and client.line.written == before
    assert not client.state.connections and not client.state.tasks


async def test_a_client_that_leaves_before_its_handler_began_has_it_never_begin() -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request())
    client.hang_up()
    await client.idle()
    assert work.exchanges == [] or work.cancelled == 1


async def test_requests_that_waited_behind_never_begin() -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a") + request("b") + request("c"))
    await turns()
    client.hang_up()
    await client.idle()
    assert len(work.exchanges) == 1 and work.cancelled == 1


async def test_bytes_that_come_after_the_end_are_nobodys() -> None:
    work = Work()
    client = connected(work.handlers)
    client.hang_up()
    client.send(request())
    await turns()
    assert work.exchanges == []


@pytest.mark.parametrize("begin", [b"", b"POST /v1", request()[:-1], request()])
async def test_a_lost_connection_leaves_no_timer_behind(begin: bytes) -> None:
    timers = Timers()
    client = connected(AT_ONCE, timers)
    client.send(begin)
    client.stop_reading()
    client.hang_up()
    await client.idle()
    assert timers.pending == 0


async def test_a_connection_is_freed_without_the_garbage_collector() -> None:
    client = connected(AT_ONCE)
    client.send(request())
    await client.idle()
    client.hang_up()
    gc.collect()
    before = sum(isinstance(thing, front.Front) for thing in gc.get_objects())
    gc.disable()
    try:
        del client.front, client.line.protocol
        after = sum(isinstance(thing, front.Front) for thing in gc.get_objects())
    finally:
        gc.enable()
    assert after == before - 1


# --- the server stops -------------------------------------------------------------------------------------------


async def test_an_idle_connection_is_closed_at_a_stop() -> None:
    client = connected(AT_ONCE)
    client.send(request())
    await client.idle()
    client.front.shutdown()
    assert client.line.is_closed and not client.line.was_cut


@pytest.mark.parametrize("path", [CHAT, "/other"])
async def test_a_running_reply_is_finished_at_a_stop_and_nothing_behind_it_begun(path: str) -> None:
    go_on = asyncio.Event()

    async def slow_app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await go_on.wait()
        await app(scope, receive, send)

    async def slow(exchange: Exchange) -> None:
        await go_on.wait()
        await at_once(exchange)

    client = Client()
    client.connect({CHAT.encode(): slow}, app=slow_app)
    client.send(request("a", path=path) + request("b"))
    await turns()
    client.front.shutdown()
    assert not client.line.is_closed
    go_on.set()
    await client.idle()
    assert client.is_whole and client.headers[b"connection"] == b"close"
    assert client.line.is_closed


# --- any cut ----------------------------------------------------------------------------------------------------


def every_cut(data: bytes) -> Callable[[int], list[bytes]]:
    return lambda size: [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 100_000])
async def test_requests_cut_anywhere_are_the_same_requests(size: int) -> None:
    work = Work(reads=True)
    client = connected(work.handlers)
    chunked = b"".join(request_pieces([b"one", b"two"], "POST", CHAT + "?x=1", [KEY, (b"x-request-id", b"b")]))
    data = request("a", b"plain") + chunked + request("c", b"")
    for piece in every_cut(data)(size):
        client.send(piece)
    await turns()
    for i in range(3):
        await work.answer(i)
    assert work.bodies == [b"plain", b"onetwo", b""]
    assert [reply.body for reply in client.replies()] == [b"a", b"b", b"c"]
