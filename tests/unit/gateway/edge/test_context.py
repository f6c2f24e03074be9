"""Exchange on a line in memory: request ids, the body under its limit, who is gone, and what a reply looks like."""

from __future__ import annotations

import asyncio
import gzip
from types import SimpleNamespace

import pytest
from fakes.client import DATE, Headers, Reply, Timers, read_reply

from gateway.domain.errors import BadRequest, BodyTimeout, BodyTooLarge, UnsupportedEncoding
from gateway.domain.request import RateState
from gateway.edge import comments
from gateway.edge.comments import COMMENT
from gateway.edge.context import Exchange
from gateway.edge.incoming import EARLY_BODY_BYTES
from gateway.edge.request_ids import RequestIds, request_id_of

IDS = RequestIds()
EXPECT = (b"expect", b"100-Continue")


class FakeLine:
    """The client's connection: keeps what is written, takes no more while `is_full`."""

    date_line = b"%b: %b\r\n" % DATE

    def __init__(self) -> None:
        self.written = b""
        self.is_full = False
        self.calls: list[str] = []

    def new_id(self) -> str:
        return IDS.new()

    def handler_ended(self, task: object) -> None:
        self.calls.append("handler ended")

    def write(self, data: bytes) -> None:
        assert data and "cut" not in self.calls
        self.written += data

    def ended(self) -> None:
        assert "ended" not in self.calls, "a reply ends once"
        self.calls.append("ended")

    def cut(self) -> None:
        self.calls.append("cut")

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def reply(self, *, is_head: bool = False) -> Reply:
        reply, rest = read_reply(self.written, is_head=is_head, is_closed=True)
        assert rest == b""
        return reply


def exchange(
    headers: Headers | None = None, *, method: str = "POST", version: str = "1.1"
) -> tuple[Exchange, FakeLine]:
    line = FakeLine()
    made = Exchange(
        line,
        method,
        [(b"x-request-id", b"mine")] if headers is None else headers,
        version=version,
        keep_alive=version == "1.1",
    )
    return made, line


# --- request ids --------------------------------------------------------------------------------------------


def id_of(*values: bytes) -> str:
    return request_id_of([(b"x-request-id", value) for value in values], IDS.new)


@pytest.mark.parametrize("value", [b"a", b"customer-42", b"4bf92f35-77b3.x_y", b"A" * 128])
def test_a_sane_request_id_is_kept(value: bytes) -> None:
    assert id_of(value) == value.decode()


@pytest.mark.parametrize(
    "values",
    [
        (),
        (b"",),
        (b"customer 42/\xc3\xa4",),
        (b"\xff",),
        (b"x" * 129,),
        (b"x" * 5000,),
        (b"a\r\nset-cookie: b",),
        (b"a\n",),
        (b"-a",),
        (b'a"b',),
        (b"a", b"a"),
        (b"a", b"b"),
    ],
)
def test_any_other_request_id_is_replaced_by_a_new_one(values: tuple[bytes, ...]) -> None:
    first, second = id_of(*values), id_of(*values)
    assert first.startswith("req-") and first.isascii() and len(first) < 64
    assert first != second


# --- the body -----------------------------------------------------------------------------------------------


async def read(
    pieces: list[bytes],
    headers: Headers | None = None,
    *,
    limit: int = 10,
    silence_s: float = 5,
    total_s: float = 50,
    early: int = 0,
    is_whole: bool = True,
) -> bytes:
    """Reads a body whose first `early` pieces are there before it is asked for."""
    mine, _ = exchange(headers)
    for piece in pieces[:early]:
        mine.feed(piece)
    if is_whole and early == len(pieces):
        mine.body_ended()
    reading = asyncio.create_task(mine.read_body(limit, silence_s, total_s))
    for piece in pieces[early:]:
        await asyncio.sleep(0)  # as between two reads of a socket
        if reading.done():
            break
        mine.feed(piece)
    await asyncio.sleep(0)
    if is_whole:
        mine.body_ended()
    return await asyncio.wait_for(reading, 5)


@pytest.mark.parametrize("early", [0, 1, 100])
@pytest.mark.parametrize("pieces", [[], [b"12345"], [b"12", b"345"], [b"1"] * 10, [b"1234567890"]])
async def test_a_body_up_to_the_limit_is_read_whole_however_it_comes(pieces: list[bytes], early: int) -> None:
    assert await read(pieces, early=min(early, len(pieces))) == b"".join(pieces)


@pytest.mark.parametrize(
    ("pieces", "declared"),
    [
        ([b"12345678901"], None),
        ([b"1"] * 11, None),
        ([b"1"] * 100_000, None),
        ([b"123456", b"789012"], b"10"),
        ([b"1"], b"11"),
        ([b"1"], b"9" * 400),
    ],
    ids=["one piece", "many", "endless", "more than declared", "declared", "declared absurdly"],
)
async def test_a_body_over_the_limit_is_cut_there_whatever_the_headers_say(
    pieces: list[bytes], declared: bytes | None
) -> None:
    with pytest.raises(BodyTooLarge, match="10 bytes"):
        await read(pieces, [] if declared is None else [(b"content-length", declared)])


async def test_a_body_over_the_limit_is_refused_even_if_it_was_there_at_once() -> None:
    with pytest.raises(BodyTooLarge):
        await read([b"123456", b"789012"], early=2)


@pytest.mark.parametrize("declared", [b"abc", b"-1", b"", b"5"])
async def test_a_wrong_length_is_not_believed(declared: bytes) -> None:
    assert await read([b"123"], [(b"content-length", declared)]) == b"123"


async def test_a_stalled_upload_ends_at_its_deadline() -> None:
    with pytest.raises(BodyTimeout, match=r"stopped arriving for 0\.001 s"):
        await read([b"1"], silence_s=0.001, is_whole=False)


async def test_a_body_that_drips_is_not_read_for_ever() -> None:
    with pytest.raises(BodyTimeout, match=r"not whole after 0\.001 s"):  # each piece in time, none of them the last
        await read([b"1"] * 100_000, limit=1_000_000, total_s=0.001, is_whole=False)


@pytest.mark.parametrize(
    "lines", [[b"br"], [b"gzip, gzip"], [b"gzip", b"gzip"], [b"identity", b"gzip"], [b"unheard-of"]]
)
async def test_a_coding_that_is_not_accepted_is_a_415_that_says_so_before_the_body_is_read(lines: list[bytes]) -> None:
    with pytest.raises(UnsupportedEncoding, match="Content-Encoding"):
        await read([], [(b"content-encoding", line) for line in lines], is_whole=False)


@pytest.mark.parametrize("encoding", [b"gzip", b"GZIP"])
async def test_a_compressed_body_is_decoded_however_it_comes(encoding: bytes) -> None:
    packed = gzip.compress(b"1234567890")
    pieces = [packed[i : i + 1] for i in range(len(packed))]
    assert await read(pieces, [(b"content-encoding", encoding)], limit=64) == b"1234567890"


async def test_the_limit_holds_for_what_is_sent_and_for_what_it_becomes() -> None:
    for plain, limit in ((bytes(65), 64), (b"1", 20)):
        with pytest.raises(BodyTooLarge):
            await read([gzip.compress(plain)], [(b"content-encoding", b"gzip")], limit=limit)


async def test_a_broken_compressed_body_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="gzip"):
        await read([b"\x1f\x8b"], [(b"content-encoding", b"gzip")])


@pytest.mark.parametrize("encoding", [b"identity", b" Identity "])
async def test_identity_is_no_compression(encoding: bytes) -> None:
    assert await read([b"123"], [(b"content-encoding", encoding)]) == b"123"


def test_a_body_that_nobody_has_asked_for_is_taken_up_to_a_bound() -> None:
    mine, line = exchange()
    mine.feed(b"x" * EARLY_BODY_BYTES)
    assert line.calls == []
    mine.feed(b"x")
    assert line.calls == ["pause"]


async def test_a_body_held_back_goes_on_when_it_is_asked_for_and_is_not_held_again() -> None:
    mine, line = exchange()
    mine.feed(b"x" * (EARLY_BODY_BYTES + 1))
    reading = asyncio.create_task(mine.read_body(1 << 20, 5, 50))
    await asyncio.sleep(0)
    assert line.calls == ["pause", "resume"]
    mine.feed(b"y" * EARLY_BODY_BYTES)
    mine.body_ended()
    assert len(await reading) == 2 * EARLY_BODY_BYTES + 1
    assert line.calls == ["pause", "resume"]


@pytest.mark.parametrize(("early", "told"), [([], b"HTTP/1.1 100 Continue\r\n\r\n"), ([b"1"], b"")])
async def test_a_caller_who_waits_for_a_word_is_told_to_go_on_when_its_body_is_wanted(
    early: list[bytes], told: bytes
) -> None:
    mine, line = exchange([EXPECT])
    for piece in early:
        mine.feed(piece)
    reading = asyncio.create_task(mine.read_body(10, 5, 50))
    await asyncio.sleep(0)
    assert line.written == told
    mine.feed(b"2")
    mine.body_ended()
    assert await reading == b"".join([*early, b"2"])
    assert line.written == told


async def test_a_caller_who_waits_is_not_told_to_go_on_with_a_body_that_is_refused() -> None:
    mine, line = exchange([(b"content-length", b"11"), EXPECT])
    with pytest.raises(BodyTooLarge):
        await mine.read_body(10, 5, 50)
    assert line.written == b""


# --- hang-ups -----------------------------------------------------------------------------------------------


async def working() -> tuple[asyncio.Task[None], Exchange]:
    """An exchange whose handler would work for ever."""

    async def work() -> None:
        await asyncio.Event().wait()

    mine, _ = exchange()
    mine.task = asyncio.create_task(work())
    await asyncio.sleep(0)  # one turn of the loop: it is at work now
    return mine.task, mine


async def test_work_is_cancelled_when_the_caller_hangs_up() -> None:
    task, mine = await working()
    mine.abandon()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert mine.is_gone and not mine.is_ended


async def test_an_exchange_ended_by_us_is_not_a_hang_up() -> None:
    task, mine = await working()
    mine.end()
    mine.end()
    assert task.cancelling() == 1
    with pytest.raises(asyncio.CancelledError):
        await task
    assert mine.is_ended and not mine.is_gone


async def test_a_caller_who_is_gone_is_not_ended_once_more() -> None:
    task, mine = await working()
    mine.abandon()
    mine.abandon()
    mine.end()
    assert task.cancelling() == 1
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_who_leaves_behind_a_whole_reply_did_not_hang_up() -> None:
    task, mine = await working()
    mine.reply(200, [], b"x")
    mine.abandon()
    assert not mine.is_gone and not task.cancelling()
    task.cancel()


def test_an_exchange_without_a_whole_reply_is_cut_when_its_handler_is_done() -> None:
    for begin in (lambda mine: None, lambda mine: mine.start(200, [])):
        mine, line = exchange()
        begin(mine)
        mine.close()
        assert line.calls == ["handler ended", "cut"]
    mine, line = exchange()
    mine.reply(200, [], b"x")
    mine.close()
    assert line.calls == ["ended", "handler ended"]


# --- replies ------------------------------------------------------------------------------------------------


def test_every_reply_carries_the_request_id_and_what_is_left_of_the_limits() -> None:
    for answer in (
        lambda mine: mine.reply(200, [(b"content-type", b"text/plain")], b"ok"),
        lambda mine: (mine.start(200, [(b"content-type", b"text/plain")]), mine.finish(b"ok")),
    ):
        mine, line = exchange()
        mine.rate = RateState(limit_requests=5, remaining_requests=4)
        answer(mine)
        reply = line.reply()
        lengths = {b"content-length", b"transfer-encoding"}
        assert {name: value for name, value in reply.headers.items() if name not in lengths} == {
            b"content-type": b"text/plain",
            b"x-ratelimit-limit-requests": b"5",
            b"x-ratelimit-remaining-requests": b"4",
            b"x-request-id": b"mine",
        }
        assert reply.is_whole and reply.body == b"ok" and line.calls == ["ended"]
        assert mine.has_started and mine.response_complete and mine.status == 200


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 1_000_000])
def test_a_whole_reply_tells_its_length(size: int) -> None:
    mine, line = exchange()
    mine.reply(200, [], b"x" * size)
    assert line.reply().headers[b"content-length"] == b"%d" % size
    assert line.reply().is_whole and line.reply().body == b"x" * size


def test_the_answer_to_a_head_is_the_head_alone() -> None:
    mine, line = exchange(method="HEAD")
    mine.reply(405, [(b"allow", b"POST")], b"12345")
    reply = line.reply(is_head=True)
    assert (reply.status, reply.headers[b"content-length"]) == (405, b"5")
    assert line.written.endswith(b"\r\n\r\n")


def test_a_status_without_a_name_is_still_a_status() -> None:
    mine, line = exchange()
    mine.reply(499, [], b"")
    assert line.reply().status == 499


def test_a_stream_goes_out_write_by_write_its_head_with_the_first() -> None:
    mine, line = exchange()
    mine.start(200, [])
    assert line.written == b""
    assert mine.write(b"data: 1\n\n")
    assert line.reply().pieces == [b"data: 1\n\n"]
    assert mine.write(b"data: 2\n\n")
    mine.finish()
    assert line.reply().pieces == [b"data: 1\n\n", b"data: 2\n\n"] and line.reply().is_whole
    assert mine.keep_alive


def test_a_client_of_http_1_0_gets_its_stream_without_chunks_and_the_end_of_the_connection() -> None:
    mine, line = exchange(version="1.0")
    mine.start(200, [])
    mine.write(b"data: 1\n\n")
    mine.finish(b"data: 2\n\n")
    reply = line.reply()
    assert reply.body == b"data: 1\n\ndata: 2\n\n"
    assert reply.headers[b"connection"] == b"close" and b"transfer-encoding" not in reply.headers
    assert not mine.keep_alive


def test_a_reply_that_closes_says_so_once() -> None:
    mine, line = exchange()
    mine.reply(413, [(b"connection", b"close")], b"x")
    assert line.reply().headers[b"connection"] == b"close" and not mine.keep_alive


def test_an_engines_refusal_comes_in_our_envelope() -> None:
    mine, line = exchange()
    mine.refuse(400, "no", "BadRequestError", "messages", 400)
    reply = line.reply()
    assert reply.error() == {"message": "no", "type": "BadRequestError", "param": "messages", "code": 400}
    assert reply.headers[b"x-poolgate-error-source"] == b"engine"
    assert reply.headers[b"x-request-id"] == b"mine"


def streamed(*writes: bytes) -> bytes:
    mine, line = exchange()
    mine.start(200, [])
    for data in writes:
        mine.write(data)
    mine.fail(502, (), b"{error}")
    assert line.reply().is_whole
    return line.reply().body


@pytest.mark.parametrize("before", [b"data: 1\n\n", b"data: 1\r\n\r\n", b"data: 1\r\r"])
def test_an_error_event_follows_whole_events_directly(before: bytes) -> None:
    assert streamed(before) == before + b"data: {error}\n\n"
    assert streamed() == b"data: {error}\n\n"


@pytest.mark.parametrize("before", [b'data: {"cho', b"data: 1\n", b"da", b"data: 1\n\ndata"])
def test_an_error_event_is_not_swallowed_by_an_event_that_broke_off(before: bytes) -> None:
    body = streamed(b"data: 0\n\n", before)
    assert body.endswith(b"\n\ndata: {error}\n\n") or body.endswith(b"\n\n\ndata: {error}\n\n")


def test_headers_are_found_by_name_the_first_one_counts() -> None:
    mine, _ = exchange([(b"a", b"1"), (b"b", b"2"), (b"b", b"3")])
    assert (mine.header(b"b"), mine.header(b"c")) == (b"2", None)


# --- a client that does not take what is written ----------------------------------------------------------------


async def test_a_full_line_is_told_to_the_writer_and_room_to_whoever_waits() -> None:
    mine, line = exchange()
    room: list[str] = []
    mine.on_room = lambda: room.append("room")
    mine.start(200, [])
    line.is_full = True
    assert not mine.write(b"data: 1\n\n")
    waiting = asyncio.create_task(mine.drained())
    await asyncio.sleep(0)
    assert not waiting.done() and room == []
    line.is_full = False
    mine.room()
    await asyncio.wait_for(waiting, 5)
    assert room == ["room"]
    assert mine.write(b"data: 2\n\n")


async def test_nobody_waits_for_room_that_is_there() -> None:
    mine, _ = exchange()
    await asyncio.wait_for(mine.drained(), 5)


def test_a_reply_that_is_whole_wants_no_room_any_more() -> None:
    mine, _ = exchange()
    mine.on_room = lambda: pytest.fail("called for a reply that has ended")
    mine.start(200, [])
    mine.finish(b"x")
    mine.room()


# --- comments while nothing comes -------------------------------------------------------------------------------


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    made = Timers()
    monkeypatch.setattr(comments, "asyncio", SimpleNamespace(get_running_loop=lambda: made))
    return made


SSE = [(b"content-type", b"text/event-stream")]


def test_the_first_comment_opens_the_stream_and_each_further_silence_gets_one(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    timers.advance(4.9)
    assert line.written == b"" and not mine.has_started
    timers.advance(0.1)
    assert line.reply().pieces == [COMMENT]
    assert (line.reply().status, line.reply().headers[b"content-type"]) == (200, b"text/event-stream")
    timers.advance(10)
    assert line.reply().pieces == [COMMENT] * 3


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_an_event_whose_end_came_in_pieces_has_ended(end: bytes, timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    mine.start(200, SSE)
    mine.write(b"data: 1")
    timers.advance(5)
    for byte in end:
        assert COMMENT not in line.reply().pieces
        mine.write(bytes([byte]))
    timers.advance(5)
    assert line.reply().pieces[-1] == COMMENT


def test_no_comment_breaks_what_is_no_silence(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    mine.start(200, SSE)
    for _ in range(10):
        timers.advance(3)
        mine.write(b"data: 1\n\n")
    assert COMMENT not in line.reply().pieces
    timers.advance(4.9)
    assert COMMENT not in line.reply().pieces
    timers.advance(0.1)
    assert line.reply().pieces == [b"data: 1\n\n"] * 10 + [COMMENT]


def test_no_comment_stands_inside_an_event(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    mine.start(200, SSE)
    mine.write(b'data: {"cho')
    timers.advance(60)
    assert line.reply().pieces == [b'data: {"cho']
    mine.write(b'ices":[]}\n\n')
    timers.advance(5)
    assert line.reply().pieces[-1] == COMMENT


def test_no_comment_is_piled_up_for_a_client_that_does_not_read(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    timers.advance(5)
    line.is_full = True
    timers.advance(600)
    assert line.reply().pieces == [COMMENT]


def test_the_engines_stream_goes_on_in_the_reply_that_a_comment_opened(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    timers.advance(5)
    mine.start(200, [*SSE, (b"x-poolgate-pool", b"a")])
    mine.write(b"data: 1\n\n")
    mine.finish()
    assert line.reply().pieces == [COMMENT, b"data: 1\n\n"] and line.reply().is_whole
    assert b"x-poolgate-pool" not in line.reply().headers, "it came too late"


def test_a_refusal_after_a_comment_is_an_event_under_200(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    timers.advance(5)
    mine.refuse(400, "no", "BadRequestError", None, 400)
    reply = line.reply()
    assert reply.status == 200 and reply.is_whole
    assert reply.pieces[-1].startswith(b'data: {"error":{"message":"no"') and reply.pieces[-1].endswith(b"\n\n")


def test_an_error_after_a_comment_is_an_event_of_its_own(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    timers.advance(5)
    mine.fail(502, (), b"{error}")
    assert line.reply().pieces == [COMMENT, b"data: {error}\n\n"] and line.reply().is_whole


@pytest.mark.parametrize("end", ["reply", "finish", "abandon", "close"])
def test_no_comment_comes_after_the_end(timers: Timers, end: str) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    if end == "reply":
        mine.reply(400, [], b"x")
    elif end == "finish":
        timers.advance(5)
        mine.finish(b"x")
    elif end == "abandon":
        mine.abandon()
    else:
        mine.close()
    before = line.written
    timers.advance(60)
    assert line.written == before and timers.pending == 0
