"""Undoes the compression of a request body, under the limit for its plain size. Called by the edge once it is whole.

All work is done in small steps on the event loop with a turn for the others in between: inflating 256 KiB takes about a
millisecond, a hop to a thread and back costs a tenth of one even for a small body, and work in a thread could not be
cancelled.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable
from typing import Protocol

from gateway.domain.errors import BadRequest, BodyTooLarge, UnsupportedEncoding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STEP_BYTES = 65_536  # most that goes into, and comes out of, a decoder at once
TURN_BYTES = 262_144  # in and out together, after which the loop gets a turn
MAX_MEMBERS = 256  # of one body: an empty one costs 20 bytes to send, and a new decoder here
ZSTD_WINDOW_LOG = 23  # 8 MiB, what RFC 9659 allows for this coding; a frame could ask for gigabytes

ACCEPTED = "gzip, deflate, zstd"


class _Decoder(Protocol):
    """One member: what zlib's and zstd's objects have in common, once `_Zlib` has levelled them."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes:
        """What came behind the end of the member."""
        ...

    @property
    def needs_input(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Zlib:
    """zlib's object, which hands input back that it had no room to decode, in the manner of zstd's, which keeps it."""

    def __init__(self, window_bits: int) -> None:
        self._inner = zlib.decompressobj(window_bits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        plain = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        # a full piece may have more behind it inside zlib, without any input being left
        self.needs_input = len(plain) < max_length and not self._inner.unconsumed_tail
        return plain


def coding_of(header: bytes | None) -> bytes | None:
    """The coding that a Content-Encoding header names, in lower case; None for a plain body.

    `header`: its value, several lines joined by a comma. Raises UnsupportedEncoding; to be asked before the body is
    read.
    """
    name = b"" if header is None else header.strip().lower()
    if name in (b"", b"identity"):
        return None
    if name not in _DECODERS:
        shown = name[:64].decode("ascii", "replace")
        raise UnsupportedEncoding(f"Content-Encoding '{shown}' is not accepted; send one of {ACCEPTED}, or none.")
    return name


async def decode_body(raw: bytes, encoding: bytes, limit_bytes: int) -> bytes:
    """The plain body. `encoding` as in the header; `limit_bytes` bounds the plain size, and the memory used for it.

    Raises BodyTooLarge as soon as the plain size passes the limit, BadRequest for data that is broken, cut off or
    followed by something else, UnsupportedEncoding.
    """
    coding = coding_of(encoding)
    if coding is None:
        return raw
    make = _DECODERS[coding]
    takes_more = coding != b"deflate"  # gzip and zstd: members and frames may follow one another
    decoder = make(raw)
    members = 1
    parts: list[bytes] = []
    size = worked = 0
    view = memoryview(raw)
    at = 0
    piece = b""
    while True:
        if not piece and decoder.needs_input and not decoder.eof:
            if at == len(raw):
                raise BadRequest(f"The body is cut off: its {coding.decode()} data has no end.")
            piece = bytes(view[at : at + STEP_BYTES])
            at += len(piece)
        try:
            plain = decoder.decompress(piece, STEP_BYTES)
        except (zlib.error, zstd.ZstdError) as exc:
            raise BadRequest(f"The body is no sound {coding.decode()} data.") from exc
        worked += len(piece) + len(plain)
        piece = b""
        size += len(plain)
        if size > limit_bytes:
            raise BodyTooLarge(
                f"The body is larger than {limit_bytes} bytes once decoded, the limit of this gateway (max_body_bytes)."
            )
        if plain:
            parts.append(plain)
        if decoder.eof:
            piece = decoder.unused_data
            if not piece and at == len(raw):
                return parts[0] if len(parts) == 1 else b"".join(parts)
            members += 1
            if not takes_more or members > MAX_MEMBERS:
                raise BadRequest(f"The body goes on behind the end of its {coding.decode()} data.")
            decoder = make(raw)
        if worked >= TURN_BYTES:
            worked = 0
            await asyncio.sleep(0)


def _gzip(_: bytes) -> _Decoder:
    return _Zlib(16 + zlib.MAX_WBITS)


def _deflate(raw: bytes) -> _Decoder:
    """With zlib's header, as the standard says, or without, as some clients do it."""
    has_header = len(raw) >= 2 and raw[0] & 0x8F == 0x08 and (raw[0] << 8 | raw[1]) % 31 == 0
    return _Zlib(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


def _zstd(_: bytes) -> _Decoder:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})


_DECODERS: dict[bytes, Callable[[bytes], _Decoder]] = {
    b"gzip": _gzip,
    b"x-gzip": _gzip,
    b"deflate": _deflate,
    b"zstd": _zstd,
}
