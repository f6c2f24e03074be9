"""The transports' tests run on both event loops: uvloop serves, asyncio is what is there without it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import pytest
import uvloop
from fakes.certificates import Authority
from fakes.scripted_upstream import Script, ScriptedUpstream, deaf_listener

from gateway.upstream.trust import Trust
from gateway.upstream.wire import WireTransport


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@dataclass
class Pair:
    """A transport, and scripted upstreams that it speaks to: plain ones or, with `is_tls`, such as speak TLS."""

    transport: WireTransport
    authority: Authority
    is_tls: bool

    @property
    def scheme(self) -> str:
        return "https" if self.is_tls else "http"

    def upstream(self, *scripts: Script) -> ScriptedUpstream:
        return ScriptedUpstream(*scripts, tls=self.authority.server_context() if self.is_tls else None)

    def deaf(self) -> contextlib.AbstractAsyncContextManager[str]:
        return deaf_listener(self.scheme)


async def ends_clean(pair: Pair) -> AsyncIterator[Pair]:
    """After each test nothing is in use, no task is left, and the loop had nothing to complain of."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    yield pair
    transport = pair.transport
    assert transport.active == 0
    await transport.aclose()
    assert transport.idle == 0 and not transport._open
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert complaints == []


def wire_transport(authority: Authority, **bounds: int) -> WireTransport:
    """Trusts the tests' authority alone, at every url."""
    context = Trust({"any": authority.certificate})("any")
    return WireTransport(lambda url: context, **bounds)


@pytest.fixture(params=["plain", "tls"])
async def both(request: pytest.FixtureRequest, authority: Authority) -> AsyncIterator[Pair]:
    """Without TLS and with it."""
    async for pair in ends_clean(Pair(wire_transport(authority), authority, request.param == "tls")):
        yield pair


@pytest.fixture
async def plain_only(authority: Authority) -> AsyncIterator[Pair]:
    async for pair in ends_clean(Pair(wire_transport(authority), authority, False)):
        yield pair


@pytest.fixture
async def https(authority: Authority) -> AsyncIterator[Pair]:
    async for pair in ends_clean(Pair(wire_transport(authority), authority, True)):
        yield pair


@pytest.fixture
def misleading_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables by which an HTTP client could be led elsewhere, all set to what would fail."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
