"""The probe list and the behaviours against the real vLLM: what the fake engine claims is what vLLM does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from contract.behaviours import BEHAVIOURS
from contract.checking import Engine, check
from contract.probes import PROBES, Probe
from contract.probes_paths import EMBED, GENERATE, RERANK
from plugins.real_engines import RealEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.parametrize("probe", PROBES + GENERATE, ids=lambda probe: probe.name)
async def test_real_vllm_answers(bare_tiny: RealEngine, probe: Probe):
    await check(bare_tiny, probe)


@pytest.mark.parametrize("probe", EMBED, ids=lambda probe: probe.name)
async def test_real_vllm_that_embeds_answers(bare_embed: RealEngine, probe: Probe):
    await check(bare_embed, probe)


@pytest.mark.parametrize("probe", RERANK, ids=lambda probe: probe.name)
async def test_real_vllm_that_ranks_answers(bare_rerank: RealEngine, probe: Probe):
    await check(bare_rerank, probe)


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
async def test_real_vllm_behaves(bare_slow: RealEngine, behaviour: Callable[[Engine], Awaitable[None]]):
    await behaviour(bare_slow)
