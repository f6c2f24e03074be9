"""The deadlines of one connection, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes import client as fakes

from gateway.edge.timers import HEAD_S, KEEP_ALIVE_S, Timers

WRITE_S = 7.0
TOTAL_S = 100.0


class Transport(asyncio.Transport):
    """Remembers how it was ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[str] = []
        self.untaken = 500

    def get_write_buffer_size(self) -> int:
        return self.untaken

    def is_closing(self) -> bool:
        return bool(self.ends)

    def close(self) -> None:
        self.ends.append("closed")

    def abort(self) -> None:
        self.ends.append("cut")


class World:
    def __init__(self) -> None:
        self.clock = fakes.Timers()
        self.transport = Transport()
        loop: Any = self.clock
        self.timers = Timers(loop, self.transport, WRITE_S, TOTAL_S)

    @property
    def ends(self) -> list[str]:
        return self.transport.ends

    def answers(self) -> None:
        self.timers.idle_since = None

    def has_answered(self) -> None:
        self.timers.idle_since = self.clock.now
        if self.timers.idle is None:
            self.timers.start_idle()


@pytest.fixture
def world() -> World:
    return World()


def test_a_head_has_its_time(world: World) -> None:
    world.timers.start_head()
    world.clock.advance(HEAD_S - 0.1)
    assert world.ends == []
    world.clock.advance(0.2)
    assert world.ends == ["closed"] and world.timers.head is None


def test_a_head_that_came_has_no_deadline_left(world: World) -> None:
    world.timers.start_head()
    world.timers.end_head()
    assert world.timers.head is None and world.clock.pending == 0


def test_a_head_behind_a_running_reply_is_not_counted_against_it(world: World) -> None:
    world.timers.start_head()
    world.answers()
    world.clock.advance(3.5 * HEAD_S)
    assert world.ends == [] and world.timers.head is not None
    world.has_answered()
    world.clock.advance(HEAD_S)
    assert world.ends == ["closed"]


def test_a_deadline_that_begins_anew_replaces_the_one_before(world: World) -> None:
    world.timers.start_head()
    world.clock.advance(HEAD_S - 1)
    world.timers.start_head()
    world.clock.advance(HEAD_S - 1)
    assert world.ends == [] and world.clock.pending == 1


def test_a_connection_that_is_closing_is_not_closed_once_more(world: World) -> None:
    world.timers.start_head()
    world.transport.close()
    world.clock.advance(HEAD_S + 1)
    assert world.ends == ["closed"]


def test_idleness_counts_from_the_last_reply_with_one_timer_for_all(world: World) -> None:
    for _ in range(5):
        world.answers()
        world.has_answered()
        assert world.clock.pending == 1
        world.clock.advance(KEEP_ALIVE_S - 1)
    assert world.ends == []
    world.clock.advance(1)
    assert world.ends == ["closed"]


def test_a_reply_longer_than_the_idle_time_is_no_idleness(world: World) -> None:
    world.has_answered()
    world.answers()
    world.clock.advance(3 * KEEP_ALIVE_S)
    assert world.ends == [] and world.timers.idle is None
    world.has_answered()
    world.clock.advance(KEEP_ALIVE_S)
    assert world.ends == ["closed"]


def test_what_still_comes_has_the_time_of_a_head_not_what_is_left_of_the_idle_time(world: World) -> None:
    world.has_answered()
    world.clock.advance(KEEP_ALIVE_S - 1)
    world.timers.start_head()
    world.clock.advance(HEAD_S - 1)
    assert world.ends == []
    world.timers.end_head()
    world.clock.advance(KEEP_ALIVE_S)
    assert world.ends == ["closed"]


def test_a_client_that_takes_nothing_is_cut(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.timers.start_write()
    world.clock.advance(WRITE_S - 0.1)
    assert world.ends == []
    world.clock.advance(0.1)
    assert world.ends == ["cut"]
    assert "gave up a caller that did not read its reply for 7 s" in caplog.text


def test_a_client_that_takes_little_at_a_time_has_not_stopped_reading(world: World) -> None:
    world.timers.start_write()
    for _ in range(10):
        world.transport.untaken -= 1
        world.clock.advance(WRITE_S)
    assert world.ends == []
    world.clock.advance(WRITE_S)
    assert world.ends == ["cut"], "it took nothing any more"


def test_a_client_that_takes_little_at_a_time_does_not_do_so_for_ever(world: World) -> None:
    world.timers.start_write()
    while world.clock.now < TOTAL_S - WRITE_S:
        world.transport.untaken -= 1
        world.clock.advance(WRITE_S)
    assert world.ends == []
    world.transport.untaken -= 1
    world.clock.advance(WRITE_S + 1)
    assert world.ends == ["cut"]


def test_what_is_left_of_a_reply_has_its_whole_time_from_the_end_of_the_reply(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that its own total deadline has ended still brings the error event to a slow reader."""
    world.timers.start_write()

    def sip_until(end: float) -> None:
        while world.clock.now < end:
            world.transport.untaken -= 1
            world.clock.advance(1)

    sip_until(TOTAL_S - 1)
    world.timers.reply_ended(world.clock.now)
    sip_until(2 * TOTAL_S - 2)
    assert world.ends == []
    sip_until(2 * TOTAL_S + 1)
    assert world.ends == ["cut"]
    assert "gave up a caller that had not taken its reply after 100 s" in caplog.text


def test_a_client_that_takes_more_in_time_is_not_cut(world: World) -> None:
    for _ in range(3):
        world.timers.start_write()
        world.clock.advance(WRITE_S - 1)
        world.timers.end_write()
        world.timers.end_write()
        world.clock.advance(WRITE_S)
    assert world.ends == [] and world.clock.pending == 0


def test_a_lost_connection_has_no_deadline(world: World) -> None:
    world.timers.start_head()
    world.timers.start_write()
    world.has_answered()
    assert world.clock.pending == 3
    world.timers.cancel()
    world.timers.cancel()
    assert world.clock.pending == 0 and world.timers.head is None and world.timers.idle is None
