from __future__ import annotations

import re

import pytest

from gateway.admission.key_record import RUN_TIME_KEY, KeyRecord, digest_of, from_hash, new_key, to_hash
from gateway.admission.key_ring import NewKey
from gateway.domain.request import Limits

FULL = KeyRecord("0badcafe", "näme", "alice", "batch", ("chat", "org/m"), Limits(1, None, 3, 10**14, 5), 10, 20, 30)
BARE = KeyRecord("0badcafe", "n", None, None, ("*",))


def as_redis_returns(record: KeyRecord) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in to_hash(record).items()}


@pytest.mark.parametrize("record", [FULL, BARE], ids=["full", "bare"])
def test_a_record_survives_redis(record: KeyRecord) -> None:
    assert from_hash(as_redis_returns(record)) == record


@pytest.mark.parametrize(
    "damage",
    [
        {b"models": b"{"},
        {b"models": b'"*"'},
        {b"models": b"[1]"},
        {b"limits": b'{"unheard_of": 1}'},
        {b"limits": b"[]"},
        {b"created_s": b"soon"},
        {b"name": b"\xff"},
    ],
    ids=str,
)
def test_a_record_that_cannot_be_read_is_a_value_error(damage: dict[bytes, bytes]) -> None:
    with pytest.raises(ValueError):
        from_hash(as_redis_returns(FULL) | damage)


def test_a_record_without_a_field_is_a_value_error() -> None:
    fields = as_redis_returns(FULL)
    del fields[b"revoked_s"]
    with pytest.raises(ValueError, match="revoked_s"):
        from_hash(fields)


def test_a_new_key_carries_its_id_and_256_random_bits() -> None:
    keys = {new_key("0badcafe") for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        assert RUN_TIME_KEY.fullmatch(key.encode())
        assert re.fullmatch(r"sk-pg-0badcafe-[A-Za-z0-9_-]{43}", key)


def test_a_new_key_is_not_shown_by_accident() -> None:
    key = new_key("0badcafe")
    assert key not in f"{NewKey(key, BARE)!r} {NewKey(key, BARE)}"


def test_the_digest_is_plain_sha256_as_sha256sum_prints_it() -> None:
    assert digest_of(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("expires_s", "revoked_s", "now_s", "state"),
    [(None, None, 99, "live"), (50, None, 49.9, "live"), (50, None, 50, "expired"), (50, 40, 41, "revoked")],
)
def test_a_key_is_live_until_it_expires_or_is_revoked(
    expires_s: int | None, revoked_s: int | None, now_s: float, state: str
) -> None:
    record = KeyRecord("0badcafe", "n", None, None, ("*",), expires_s=expires_s, revoked_s=revoked_s)
    assert record.state(now_s) == state
    assert record.is_live(now_s) == (state == "live")
