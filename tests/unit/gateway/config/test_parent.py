"""follow_parent without dying with one: what is asked of the kernel, and what a dead parent means."""

from __future__ import annotations

import os
import signal

import pytest

from gateway.config import parent
from gateway.config.parent import PARENT_VARIABLE, follow_parent, prctl


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The calls of prctl, which are not made."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(parent, "prctl", lambda option, value: calls.append((option, value)))
    return calls


@pytest.mark.parametrize("value", [None, "", "abc", "-5", "1.5"])
def test_a_process_that_nobody_leads_goes_on_alone(
    value: str | None, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(PARENT_VARIABLE, value)
    assert follow_parent() and asked == []


def test_a_living_parents_death_is_to_be_told_by_sigterm(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getppid()))
    assert follow_parent()
    assert asked == [(1, signal.SIGTERM)]


def test_a_parent_that_died_before_the_kernel_was_asked_is_noticed(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getppid() + 1))
    assert not follow_parent()
    assert len(asked) == 1, "asked first, or a death in between would go unnoticed"


def test_a_refusal_of_the_kernel_is_an_oserror() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        prctl(-1, 0)
