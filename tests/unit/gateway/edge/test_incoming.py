"""The body of a request under its limit and its deadlines, and its headers."""

from __future__ import annotations

import asyncio
import gzip

import pytest
from fakes.client import Headers

from gateway.domain.errors import BadRequest, BodyTimeout, BodyTooLarge, UnsupportedEncoding
from gateway.edge.incoming import EARLY_BODY_BYTES

from .exchange_line import exchange

EXPECT = (b"expect", b"100-Continue")


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
    mine, _ = exchange()
    assert mine.feed(b"x" * EARLY_BODY_BYTES)
    assert not mine.feed(b"x")


async def test_a_body_held_back_goes_on_when_it_is_asked_for_and_is_not_held_again() -> None:
    mine, line = exchange()
    assert not mine.feed(b"x" * (EARLY_BODY_BYTES + 1))
    reading = asyncio.create_task(mine.read_body(1 << 20, 5, 50))
    await asyncio.sleep(0)
    assert line.calls == ["resume"]
    assert mine.feed(b"y" * EARLY_BODY_BYTES)
    mine.body_ended()
    assert len(await reading) == 2 * EARLY_BODY_BYTES + 1
    assert line.calls == ["resume"]


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


def test_headers_are_found_by_name_the_first_one_counts() -> None:
    mine, _ = exchange([(b"a", b"1"), (b"b", b"2"), (b"b", b"3")])
    assert (mine.header(b"b"), mine.header(b"c")) == (b"2", None)
