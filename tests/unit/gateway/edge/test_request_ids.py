"""A caller's own request id is kept when it is sane; any other request gets a new one."""

from __future__ import annotations

import pytest

from gateway.edge.request_ids import request_id_of

from .exchange_line import IDS


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
