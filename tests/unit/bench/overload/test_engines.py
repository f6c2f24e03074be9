"""The stand-in serves no more than its slots, the others in order, and takes the time that the capacity says."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from statistics import mean

import pytest
from fakes.kept_transport import KeptTransport

from bench.fake_upstream import SERVED_NAME, Connection
from bench.overload.capacity import ENGINES, FIRST_S, INTERVAL_S, LENGTHS, PER_S, SLOTS
from bench.overload.engines import BoundedEngine
from bench.request import Target, raw

ASK = raw(Target(1, SERVED_NAME, "k"), is_stream=True)


class HandTimer:
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class HandClock:
    """Time passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = itertools.count()
        self._due: list[tuple[float, int, HandTimer, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> HandTimer:
        timer = HandTimer()
        heapq.heappush(self._due, (when, next(self._count), timer, callback))
        return timer

    def run_until(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, timer, callback = heapq.heappop(self._due)
            if not timer.is_cancelled:
                callback()
        self.now = until


class Asked:
    """A client that has asked for a stream."""

    def __init__(self, engine: BoundedEngine) -> None:
        self.connection = Connection(engine)
        self.transport = KeptTransport()
        self.connection.connection_made(self.transport)
        self.connection.data_received(ASK)

    @property
    def tokens(self) -> int:
        return self.transport.written.count(b'"content":" token"')

    @property
    def is_done(self) -> bool:
        return b"data: [DONE]" in self.transport.written


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def waiting_and_running(engine: BoundedEngine) -> tuple[int, int]:
    gauges = dict(line.rsplit(" ", 1) for line in engine.metrics().splitlines())
    found = {name.partition("{")[0]: value for name, value in gauges.items()}
    return int(found["vllm:num_requests_waiting"]), int(found["vllm:num_requests_running"])


def test_the_capacity_is_what_the_slots_allow_for_the_mean_length() -> None:
    assert pytest.approx(ENGINES * SLOTS / (FIRST_S + (mean(LENGTHS) - 1) * INTERVAL_S)) == PER_S


def test_a_stream_has_its_status_at_once_and_its_first_event_with_the_first_token(clock: HandClock) -> None:
    asked = Asked(BoundedEngine(clock))
    assert asked.transport.written.startswith(b"HTTP/1.1 200 OK") and b"data:" not in asked.transport.written
    clock.run_until(FIRST_S - 0.001)
    assert b"data:" not in asked.transport.written
    clock.run_until(FIRST_S)
    assert b'"role":"assistant"' in asked.transport.written and asked.tokens == 1
    clock.run_until(FIRST_S + (LENGTHS[0] - 1) * INTERVAL_S + 1e-9)
    assert asked.is_done and asked.tokens == LENGTHS[0]


def test_who_finds_no_slot_waits_and_goes_in_the_order_of_arrival(clock: HandClock) -> None:
    engine = BoundedEngine(clock, slots=1)
    first, second, third = (Asked(engine) for _ in range(3))
    assert waiting_and_running(engine) == (2, 1)
    while not first.is_done:
        clock.run_until(clock.now + INTERVAL_S)
    assert (second.tokens, third.tokens) == (0, 0) and waiting_and_running(engine) == (1, 1)
    while not second.is_done:
        clock.run_until(clock.now + INTERVAL_S)
    assert third.tokens == 0 and waiting_and_running(engine) == (0, 1)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_client_that_leaves_makes_room_whether_it_is_served_or_waits(clock: HandClock, leaver: int) -> None:
    engine = BoundedEngine(clock, slots=1)
    asked = [Asked(engine) for _ in range(3)]
    left = asked.pop(leaver)
    left.connection.connection_lost(None)
    assert waiting_and_running(engine) == (1, 1)
    clock.run_until(10.0)
    assert all(each.is_done for each in asked) and waiting_and_running(engine) == (0, 0)
    assert left.tokens == 0


def test_full_slots_finish_as_many_streams_as_the_capacity_says(clock: HandClock) -> None:
    engine = BoundedEngine(clock)
    asked = [Asked(engine) for _ in range(2000)]
    clock.run_until(20.0)
    done = sum(each.is_done for each in asked)
    assert done == pytest.approx(20.0 * PER_S / ENGINES, rel=0.03)
