"""Compressed bodies: bombs, broken ones, unknown ones and sound ones."""

from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest
from fakes.bodies import FORM_TYPE, any_body
from fakes.stage import peak_kib, post

from gateway.domain.endpoint import Endpoint

from .conftest import LIMIT_BYTES, ROOM_KIB, Line, check_shape

pytestmark = pytest.mark.asyncio(loop_scope="module")


def bomb(size: int) -> bytes:
    """That many zeros, packed piece by piece."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    piece = bytes(1 << 20)
    return b"".join([*(packer.compress(piece) for _ in range(size >> 20)), packer.flush()])


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.EMBEDDINGS, Endpoint.TRANSCRIPTIONS])
async def test_small_gzip_body_becomes_gigabytes(line: Line, endpoint: Endpoint) -> None:
    packed = bomb(96 << 20)
    assert len(packed) < LIMIT_BYTES
    before = peak_kib(line.gateway.pid)
    replies = await asyncio.gather(
        *(post(line.gateway, endpoint.value, packed, b"Content-Encoding: gzip") for _ in range(8))
    )
    assert {reply.status for reply in replies} == {413}
    assert str(LIMIT_BYTES) in check_shape(endpoint, replies[0].body)
    assert peak_kib(line.gateway.pid) - before < ROOM_KIB
    assert line.stage.requests == []
    await line.check_alive()


BAD_CODINGS: dict[str, tuple[bytes, bytes, int]] = {
    "cut off": (b"gzip", gzip.compress(b"{}" * 100)[:-1], 400),
    "broken checksum": (b"gzip", gzip.compress(b"{}")[:-8] + bytes(8), 400),
    "something behind": (b"gzip", gzip.compress(b"{}") + b"x", 400),
    "no gzip at all": (b"gzip", b'{"model": "chat"}', 400),
    "nothing": (b"gzip", b"", 400),
    "twice, told once": (b"gzip", gzip.compress(gzip.compress(b"{}")), 400),
    "twice, told twice": (b"gzip, gzip", gzip.compress(gzip.compress(b"{}")), 415),
    "unknown": (b"br", b"{}", 415),
    "odd name": (b"\xff\x00x", b"{}", 400),
}


@pytest.mark.parametrize(("coding", "body", "status"), BAD_CODINGS.values(), ids=BAD_CODINGS)
async def test_broken_or_unknown_compression_is_called_bad_json(
    line: Line, coding: bytes, body: bytes, status: int
) -> None:
    for endpoint in (Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.TRANSCRIPTIONS):
        reply = await post(
            line.gateway, endpoint.value, body, b"Content-Encoding: " + coding, b"Content-Type: " + FORM_TYPE
        )
        assert reply.status == status
        if status == 415:
            assert "gzip, deflate, zstd" in check_shape(endpoint, reply.body)
    assert line.stage.requests == []
    await line.check_alive()


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_compressed_request_is_not_understood(line: Line, endpoint: Endpoint) -> None:
    """It is decoded on every path, and the engine gets it plain, with the length that it then has."""
    body, content_type = any_body(endpoint)
    plain = await post(line.gateway, endpoint.value, body, b"Content-Type: " + content_type)
    packed = await post(
        line.gateway,
        endpoint.value,
        gzip.compress(body),
        b"Content-Encoding: gzip",
        b"Content-Type: " + content_type,
    )
    assert (plain.status, packed.status) == (200, 200)
    one, two = line.stage.requests
    assert one.body == two.body
    assert two.header(b"content-encoding") == []
    assert two.header(b"content-length") == [b"%d" % len(two.body)]
