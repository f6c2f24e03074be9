"""The probe list and the behaviours against the fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from contract.answers import NAME
from contract.behaviours import BEHAVIOURS
from contract.checking import Engine, check
from contract.probes import PROBES, Probe
from contract.probes_paths import EMBED, GENERATE, RERANK
from fakes.engine import FakeEngine, running_fake_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[FakeEngine]:
    async with running_fake_engine("--scheduling-policy", "priority", "--fake-itl-ms", "2", name=NAME) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embed() -> AsyncIterator[FakeEngine]:
    async with running_fake_engine("--runner", "pooling", "--max-model-len", "512", name=NAME) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rerank() -> AsyncIterator[FakeEngine]:
    flags = ("--runner", "pooling", "--convert", "classify", "--max-model-len", "512")
    async with running_fake_engine(*flags, name=NAME) as started:
        yield started


@pytest.mark.parametrize("probe", PROBES + GENERATE, ids=lambda probe: probe.name)
async def test_fake_engine_answers(engine: FakeEngine, probe: Probe):
    await check(engine, probe)


@pytest.mark.parametrize("probe", EMBED, ids=lambda probe: probe.name)
async def test_fake_engine_that_embeds_answers(embed: FakeEngine, probe: Probe):
    await check(embed, probe)


@pytest.mark.parametrize("probe", RERANK, ids=lambda probe: probe.name)
async def test_fake_engine_that_ranks_answers(rerank: FakeEngine, probe: Probe):
    await check(rerank, probe)


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
async def test_fake_engine_behaves(engine: FakeEngine, behaviour: Callable[[Engine], Awaitable[None]]):
    await behaviour(engine)
