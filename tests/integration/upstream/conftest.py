"""The transports' tests run on both event loops: uvloop serves, asyncio is what is there without it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import pytest
import uvloop
from fakes.certificates import Authority
from fakes.scripted_upstream import Script, ScriptedUpstream, deaf_listener, eventually

from gateway.upstream.http import HttpTransport
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


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@dataclass
class Pair:
    """A transport, and scripted upstreams that it can speak to."""

    transport: WireTransport | HttpTransport
    authority: Authority

    @property
    def is_tls(self) -> bool:
        return isinstance(self.transport, HttpTransport)

    def upstream(self, *scripts: Script) -> ScriptedUpstream:
        return ScriptedUpstream(*scripts, tls=self.authority.server_context() if self.is_tls else None)

    def deaf(self) -> contextlib.AbstractAsyncContextManager[str]:
        return deaf_listener("https" if self.is_tls else "http")


async def ends_clean(pair: Pair) -> AsyncIterator[Pair]:
    """After each test nothing is in use, and no task is left."""
    yield pair
    transport = pair.transport
    assert transport.active == 0
    await transport.aclose()
    assert transport.idle == 0
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})


@pytest.fixture(params=["wire", "https"])
async def both(request: pytest.FixtureRequest, authority: Authority) -> AsyncIterator[Pair]:
    """Each transport in turn."""
    context = authority.client_context()
    transport = WireTransport() if request.param == "wire" else HttpTransport(lambda url: context)
    async for pair in ends_clean(Pair(transport, authority)):
        yield pair


@pytest.fixture
async def https(authority: Authority) -> AsyncIterator[Pair]:
    context = authority.client_context()
    async for pair in ends_clean(Pair(HttpTransport(lambda url: context), authority)):
        yield pair


@pytest.fixture
def misleading_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables by which an HTTP client could be led elsewhere, all set to what would fail."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
