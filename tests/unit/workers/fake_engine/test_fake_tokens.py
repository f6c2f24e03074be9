"""Tokens and words of the fake engine: what gateway tests count on when they compute lengths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.fake_engine.engine import count_tokens, pieces_of, token_ids, words

texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(texts)
def test_tokens_are_never_more_than_bytes(text: str):
    assert count_tokens(text) <= len(text.encode())


@given(texts)
def test_each_token_has_an_id(text: str):
    assert len(token_ids(text)) == count_tokens(text)


@given(texts)
def test_pieces_of_a_given_text_join_to_it_again(text: str):
    assert "".join(pieces_of(text)) == text


def test_a_token_is_up_to_four_characters_with_the_blank_before_them():
    assert count_tokens("hello world") == 4
    assert count_tokens("a b c") == 3


def test_equal_prompts_have_equal_answers_and_choices_differ():
    assert words("hi", 0, 5) == words("hi", 0, 5)
    assert words("hi", 0, 5) != words("hi", 1, 5)
    assert len(words("hi", 0, 5)) == 5
