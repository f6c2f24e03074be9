"""Compressed request bodies: what is decoded, what is refused, and that neither memory nor time runs away."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from fakes.bodies import MESSAGES

from gateway.domain.errors import BadRequest, BodyTooLarge, UnsupportedEncoding
from gateway.edge.encoding import MAX_MEMBERS, TURN_BYTES, coding_of, decode_body

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHAT = json.dumps({"model": "chat", "messages": MESSAGES * 500}).encode()
LIMIT = 8 << 20


def raw_deflate(plain: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(plain) + made.flush()


PACK: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": gzip.compress,
    b"x-gzip": gzip.compress,
    b"GZip": gzip.compress,
    b"deflate": zlib.compress,
    b" Deflate ": raw_deflate,
    b"zstd": zstd.compress,
}
CODINGS = pytest.mark.parametrize("encoding", PACK)


def zeros(size: int, encoding: bytes) -> bytes:
    """`size` zeros, compressed in pieces."""
    if encoding == b"zstd":
        packer = zstd.ZstdCompressor()
        return b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)) + packer.flush()
    made = zlib.compressobj(wbits=31 if encoding == b"gzip" else 15)
    return b"".join(made.compress(bytes(1 << 20)) for _ in range(size >> 20)) + made.flush()


# --- what is understood ---------------------------------------------------------------------------------------------


@CODINGS
async def test_compressed_request_is_understood(encoding: bytes) -> None:
    assert await decode_body(PACK[encoding](CHAT), encoding, LIMIT) == CHAT


@CODINGS
@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 1_000_000])
async def test_every_size_comes_out_whole(encoding: bytes, size: int) -> None:
    plain = bytes(i * i >> 3 & 0xFF for i in range(size))
    assert await decode_body(PACK[encoding](plain), encoding, LIMIT) == plain


@CODINGS
async def test_a_body_of_exactly_the_limit_is_taken(encoding: bytes) -> None:
    packed = PACK[encoding](bytes(100_000))
    assert len(await decode_body(packed, encoding, 100_000)) == 100_000
    with pytest.raises(BodyTooLarge, match="99999 bytes once decoded"):
        await decode_body(packed, encoding, 99_999)


@pytest.mark.parametrize("encoding", [b"gzip", b"zstd"])
async def test_members_that_follow_one_another_are_one_body_under_one_limit(encoding: bytes) -> None:
    pack = PACK[encoding]
    packed = b"".join(pack(plain) for plain in (b"one", b"", b"two" * 50_000, b"three"))
    assert await decode_body(packed, encoding, LIMIT) == b"one" + b"two" * 50_000 + b"three"
    with pytest.raises(BodyTooLarge):
        await decode_body(pack(bytes(600)) + pack(bytes(600)), encoding, 1000)


@pytest.mark.parametrize("header", [None, b"", b"identity", b" Identity "])
async def test_identity_is_no_compression(header: bytes | None) -> None:
    assert coding_of(header) is None
    assert await decode_body(b"as it is", header or b"identity", LIMIT) == b"as it is"


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [b"br", b"gzip, gzip", b"gzip,identity", b"identity, gzip", b"gzip;q=1", b"g\xffzip", b"x" * 1000, b"*"]
)
async def test_unknown_or_double_encoding_is_refused_and_told_what_is_accepted(header: bytes) -> None:
    with pytest.raises(UnsupportedEncoding, match="send one of gzip, deflate, zstd, or none") as caught:
        await decode_body(b"{}", header, LIMIT)
    assert len(caught.value.message) < 200


@CODINGS
@pytest.mark.parametrize("keep", [0, 1, 5, 40, -1, -4, -9])
async def test_broken_tail_is_a_bad_request(encoding: bytes, keep: int) -> None:
    with pytest.raises(BadRequest, match=r"cut off|no sound"):
        await decode_body(PACK[encoding](CHAT)[:keep], encoding, LIMIT)


@CODINGS
@pytest.mark.parametrize("tail", [b"\0", b"{}", b"x" * 70_000])
async def test_garbage_behind_the_data_is_a_bad_request(encoding: bytes, tail: bytes) -> None:
    with pytest.raises(BadRequest):
        await decode_body(PACK[encoding](CHAT) + tail, encoding, LIMIT)


@CODINGS
async def test_body_that_is_not_compressed_at_all_is_a_bad_request(encoding: bytes) -> None:
    with pytest.raises(BadRequest):
        await decode_body(CHAT, encoding, LIMIT)


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"zstd"])
async def test_flipped_byte_is_a_bad_request(encoding: bytes) -> None:
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.checksum_flag: 1})
    packed = bytearray(packer.compress(CHAT) + packer.flush() if encoding == b"zstd" else PACK[encoding](CHAT))
    packed[-2] ^= 0xFF  # within the checksum
    with pytest.raises(BadRequest, match="no sound"):
        await decode_body(bytes(packed), encoding, LIMIT)


async def test_deflate_has_one_stream_only() -> None:
    with pytest.raises(BadRequest, match="goes on behind the end"):
        await decode_body(zlib.compress(b"{}") * 2, b"deflate", LIMIT)


@pytest.mark.parametrize("encoding", [b"gzip", b"zstd"])
async def test_a_body_of_countless_empty_members_is_refused(encoding: bytes) -> None:
    one = PACK[encoding](b"")
    assert await decode_body(one * MAX_MEMBERS, encoding, LIMIT) == b""
    with pytest.raises(BadRequest, match="goes on behind the end"):
        await decode_body(one * (MAX_MEMBERS + 1), encoding, LIMIT)


async def test_a_zstd_frame_that_asks_for_a_huge_window_is_refused() -> None:
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    packed = packer.compress(bytes(1000)) + packer.flush()
    with pytest.raises(BadRequest):
        await decode_body(packed, b"zstd", LIMIT)


# --- bombs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"zstd"])
async def test_gzip_bomb_is_cut_at_the_plain_limit_with_memory_flat(encoding: bytes) -> None:
    bomb = zeros(1 << 30, encoding)
    assert len(bomb) < 2_000_000
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            await decode_body(bomb, encoding, 1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20


async def test_gzip_inside_gzip_is_decoded_once_as_the_header_says() -> None:
    inner = gzip.compress(CHAT)
    assert await decode_body(gzip.compress(inner), b"gzip", LIMIT) == inner


@pytest.mark.parametrize("encoding", [b"gzip", b"zstd"])
async def test_others_get_their_turn_while_a_large_body_is_decoded(encoding: bytes) -> None:
    size = 8 << 20
    decoding = asyncio.create_task(decode_body(zeros(size, encoding), encoding, size))
    turns = 0
    while not decoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(decoding.result()) == size
    assert turns >= size // (TURN_BYTES * 2)


async def test_decoding_can_be_cancelled() -> None:
    decoding = asyncio.create_task(decode_body(zeros(64 << 20, b"gzip"), b"gzip", 64 << 20))
    await asyncio.sleep(0)
    decoding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await decoding
