"""check_messages: what is let through to the engine, and that a fault is named by its element."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain.errors import BadRequest
from gateway.edge.messages import ROLES, check_messages

USER = {"role": "user", "content": "Hi"}
TEXT = {"type": "text", "text": "Hi"}


def check(messages: Any) -> bool:
    return check_messages(msgspec.Raw(json.dumps(messages).encode()))


def refused(messages: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        check(messages)
    return caught.value


@pytest.mark.parametrize("role", ROLES)
def test_every_role_that_engines_know_is_taken(role: str) -> None:
    check([{"role": role, "content": "Hi", "tool_call_id": "c1"}])


@pytest.mark.parametrize("content", ["Hi", "", [TEXT], [], [TEXT, {"type": "image_url", "image_url": {"url": "x"}}]])
def test_content_is_a_string_or_parts(content: Any) -> None:
    check([{"role": "user", "content": content}])


def test_a_part_that_is_not_text_makes_the_chat_multimodal() -> None:
    assert not check([USER, {"role": "user", "content": [TEXT]}])
    assert check([{"role": "user", "content": [TEXT, {"type": "input_audio", "input_audio": {}}]}, USER])


def test_broken_tool_arguments_in_the_history_are_the_engines_matter() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Par'}}
    for content in ({"content": None}, {}, {"content": ""}):
        check(
            [
                USER,
                {"role": "assistant", "tool_calls": [call], **content},
                {"role": "tool", "tool_call_id": "c1", "content": ""},
            ]
        )


def test_a_function_call_of_the_old_kind_is_let_through() -> None:
    call = {"name": "f", "arguments": "{}"}
    check([USER, {"role": "assistant", "content": None, "function_call": call}, {"role": "function", "content": "42"}])


def test_an_assistants_turn_may_be_empty_and_a_tool_message_may_lack_its_call() -> None:
    check([USER, {"role": "assistant"}, {"role": "tool", "tool_call_id": "lost", "content": "42"}])


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([USER, {"content": "x"}], "messages[1]"),
        ([USER, {"role": 5, "content": "x"}], "messages[1].role"),
        ([USER, USER, {"role": "user"}], "messages[2].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": [TEXT, {"text": "x"}]}], "messages[0].content[1]"),
        ([{"role": "user", "content": [TEXT, {"type": "text"}]}], "messages[0].content[1].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]"),
        ([{"role": "tool", "content": "42"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        (["Hi"], "messages[0]"),
        ([None], "messages[0]"),
        ("Hi", "messages"),
        ({}, "messages"),
        (5, "messages"),
    ],
)
def test_a_fault_is_named_by_its_element(messages: Any, where: str) -> None:
    error = refused(messages)
    assert where in error.message.replace("`", "").replace("[...]", "[0]")
    assert (error.param or "").startswith("messages")


@pytest.mark.parametrize("raw", [None, msgspec.Raw(b"null"), msgspec.Raw(b"[]")])
def test_messages_that_are_missing_or_empty_are_refused(raw: msgspec.Raw | None) -> None:
    with pytest.raises(BadRequest, match="'messages' is"):
        check_messages(raw)


def test_an_error_about_ten_thousand_bad_parts_stays_short_and_copies_no_text() -> None:
    secret = "my secret text"
    for messages in (
        [{"role": "user", "content": [{"type": "text", "text": [secret]}] * 10_000}],
        [{"role": secret * 1000, "content": secret}] * 100,
        [{"role": "user", "content": [{"type": "text", "txt": secret}] * 10_000}],
    ):
        error = refused(messages)
        assert secret not in error.message
        assert len(error.message) <= 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "tool_calls", "x"]), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.lists(st.fixed_dictionaries({"role": st.sampled_from(ROLES)}, optional={"content": JSON}) | JSON, max_size=4))
def test_any_json_as_messages_is_taken_or_refused(messages: Any) -> None:
    try:
        check(messages)
    except BadRequest as exc:
        assert len(exc.message) <= 500
