"""How a request ended, and what it used: what a ticket is settled with."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Ending(StrEnum):
    """`word` is the value, in reach of one look-up: an enum's own `value` costs ten times that."""

    word: str

    def __new__(cls, value: str) -> Ending:
        member = str.__new__(cls, value)
        member._value_ = member.word = value
        return member

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    UPSTREAM_ERROR = "upstream_error"  # before or after the first byte
    ENGINE_REFUSED = "engine_refused"  # the engine answered 4xx
    REFUSED = "refused"  # by us, before any replica was asked
    FAILED = "failed"  # a defect of ours


class Usage(NamedTuple):
    """Token counts as the engine reported them, or as we counted them when it could not."""

    prompt_tokens: int
    completion_tokens: int


class Outcome(NamedTuple):
    """`usage` is None when nothing was generated: then the whole reservation goes back."""

    ending: Ending
    status: int
    usage: Usage | None
    error_code: str | None = None
