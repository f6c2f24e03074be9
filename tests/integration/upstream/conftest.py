"""The transport's tests run on both event loops: uvloop serves, asyncio is what is there without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from gateway.upstream.wire import WireTransport


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def transport() -> AsyncIterator[WireTransport]:
    """After each test nothing is in use, and no task is left."""
    wire = WireTransport()
    yield wire
    assert wire.active == 0
    await wire.aclose()
    assert wire.idle == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
