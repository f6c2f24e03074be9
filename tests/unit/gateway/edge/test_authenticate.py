"""Which key a request carries, and the class it runs in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.story import ALICE, a_config

from gateway.config.schema import ClassSection
from gateway.domain.errors import BadRequest, InvalidKey, NotAllowed
from gateway.edge.authenticate import class_for, presented_key

KEY = b"sk-Key-123"


def authorization(value: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", value)]


@pytest.mark.parametrize(
    "value",
    [
        b"Bearer " + KEY,
        b"bearer " + KEY,
        b"BEARER " + KEY,
        b"bEaReR  " + KEY,
        b"Bearer\t" + KEY,
        b"Bearer " + KEY + b" ",
        b" Bearer \t " + KEY + b"\t",
    ],
)
def test_bearer_in_any_case_with_blanks_around_the_key_is_accepted(value: bytes) -> None:
    assert presented_key(authorization(value)) == KEY


def test_x_api_key_is_accepted_with_blanks_around_it() -> None:
    assert presented_key([(b"x-api-key", b" " + KEY + b"\t")]) == KEY


def test_the_key_itself_is_exact() -> None:
    assert presented_key(authorization(b"Bearer a B\tc")) == b"a B\tc"


@pytest.mark.parametrize(
    "value", ["“key”".encode(), "a—b".encode(), b"\xff", b"a" * 100_000], ids=["quote", "dash", "ff", "long"]
)
def test_a_key_that_is_not_ascii_is_handed_on_to_be_refused_like_any_other(value: bytes) -> None:
    assert presented_key(authorization(b"Bearer " + value)) == value


@pytest.mark.parametrize(
    "headers",
    [
        [],
        authorization(b""),
        authorization(b"Bearer"),
        authorization(b"Bearer "),
        authorization(b"Bearer \t"),
        authorization(KEY),
        authorization(b"Basic " + KEY),
        authorization(b"Bearer" + KEY),
        [(b"x-api-key", b"")],
        [(b"x-api-key", b" ")],
    ],
)
def test_no_key_and_odd_ones_are_refused_with_one_and_the_same_message(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidKey) as caught:
        presented_key(headers)
    assert caught.value.message == InvalidKey.MESSAGE


def test_authorization_counts_alone_when_both_headers_came() -> None:
    both = [(b"x-api-key", b"other"), (b"authorization", b"Bearer " + KEY)]
    assert presented_key(both) == presented_key(both[::-1]) == KEY
    with pytest.raises(InvalidKey):
        presented_key([(b"x-api-key", KEY), (b"authorization", b"Basic dXNlcg==")])


# --- class rules --------------------------------------------------------------------------------------------

CLASSES: dict[str, ClassSection] = dict(
    a_config(
        classes={
            "gold": {"priority": -5},
            "default": {"priority": 0},
            "same": {"priority": 0},
            "batch": {"priority": 10},
        }
    ).config.classes
)


def test_without_the_header_a_request_runs_in_its_keys_class() -> None:
    assert class_for(None, ALICE, CLASSES) == "default"


@pytest.mark.parametrize("asked", [b"default", b"same", b"batch", b" batch "])
def test_a_caller_may_ask_for_its_own_class_and_for_those_that_go_later(asked: bytes) -> None:
    assert class_for(asked, ALICE, CLASSES) == asked.strip().decode()


def test_a_class_that_goes_before_the_keys_own_is_not_allowed() -> None:
    with pytest.raises(NotAllowed, match=r"'default'.*'gold'"):
        class_for(b"gold", ALICE, CLASSES)
    assert class_for(b"gold", replace(ALICE, class_name="gold"), CLASSES) == "gold"


@pytest.mark.parametrize("asked", [b"", b"Batch", b"nothing", b"\xff\xfe", b"a" * 10_000])
def test_an_unknown_class_is_refused_with_the_known_ones_and_without_what_was_asked(asked: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        class_for(asked, ALICE, CLASSES)
    assert "batch, default, gold, same" in caught.value.message
    assert len(caught.value.message) < 200
