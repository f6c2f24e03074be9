"""How many candidates are asked, and for how long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fakes.story import FakeReply, FakeTransport

from gateway.domain.errors import ConnectFailed, EngineFailed
from gateway.domain.outcome import Ending
from gateway.upstream.retry import MAX_REFUSED
from gateway.upstream.transport import Deadlines, UpstreamRequest

from .attempts_world import REFUSED, A, B, C, D, E, F, World, fine, status, world


@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
async def test_no_more_replicas_are_asked_than_the_config_says(attempts: int) -> None:
    made = await world(*(status(500) for _ in range(6)), attempts=attempts)
    with pytest.raises(EngineFailed):
        await made.run(A, B, C, D, E, F)
    assert len(made.transport.sent) == attempts


async def test_refused_connections_are_not_attempts_and_have_a_bound_of_their_own() -> None:
    made = await world(*([REFUSED] * 6))
    with pytest.raises(ConnectFailed):
        await made.run(A, B, C, D, E, F)
    assert len(made.transport.sent) == MAX_REFUSED
    made = await world(REFUSED, REFUSED, status(500), fine())
    assert (await made.run(A, B, C, D)).ending is Ending.COMPLETED


async def test_a_fleet_with_refused_connections_gets_no_less_because_the_budget_is_spent() -> None:
    made = await world(REFUSED, fine(), share=0)
    assert (await made.run(A, B)).ending is Ending.COMPLETED


async def test_no_share_means_no_further_attempt() -> None:
    made = await world(status(500), fine(), share=0)
    with pytest.raises(EngineFailed):
        await made.run(A, B)
    assert made.transport.urls == [A.url]


async def test_a_fleet_in_trouble_gets_a_share_more_and_not_twice_the_load() -> None:
    made = await world(*(status(500) for _ in range(1000)), share=0.1)
    for _ in range(200):
        with pytest.raises(EngineFailed):
            await made.run(A, B)
    assert 220 <= len(made.transport.sent) <= 231  # the burst, and a tenth


class SlowTransport(FakeTransport):
    """Each request takes `each_s` of the time that attempt.py reads."""

    def __init__(self, patch: pytest.MonkeyPatch, each_s: float, *script: FakeReply) -> None:
        super().__init__(*script)
        self._each_s = each_s
        self._now = 100.0
        patch.setattr("gateway.upstream.attempt.time", SimpleNamespace(monotonic=lambda: self._now))

    async def send(self, url: str, request: UpstreamRequest, deadlines: Deadlines) -> FakeReply:
        self._now += self._each_s
        return await super().send(url, request, deadlines)


async def test_no_further_attempt_begins_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = World(SlowTransport(monkeypatch, 6, *(status(500) for _ in range(5))), attempts=5, within_s=10)
    with pytest.raises(EngineFailed):
        await made.run(A, B, C, D, E)
    assert len(made.transport.sent) == 2, "after 6 s another one, after 12 s none"
    assert [deadlines.total_s for deadlines in made.transport.deadlines] == [40, 34], "the total deadline is one"


async def test_a_total_deadline_that_is_used_up_ends_the_next_attempt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = World(SlowTransport(monkeypatch, 50, status(500), fine()), within_s=100)
    await made.run(A, B)
    assert 0 < made.transport.deadlines[1].total_s < 0.01


async def test_without_candidates_behind_it_a_failure_is_told_at_once() -> None:
    made = await world(status(500))
    with pytest.raises(EngineFailed):
        await made.run(A)
