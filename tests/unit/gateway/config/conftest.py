"""Keeps the developer's own POOLGATE_… variables out of these tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("POOLGATE_")]:
        monkeypatch.delenv(name)
