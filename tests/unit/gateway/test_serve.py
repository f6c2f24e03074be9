"""ProcessGroup over children that are not started: the dead are replaced, a stop is passed on, the stuck are killed."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from fakes.story import a_config

from gateway import serve
from gateway.config.parent import PARENT_VARIABLE
from gateway.domain.errors import ConfigError
from gateway.serve import LISTENER_VARIABLE, ProcessGroup, allow_open_files
from gateway.telemetry.shared_values import SLOT_VARIABLE, slot_from_environment

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Child:
    """A process as subprocess.Popen shows it; ends when it gets a signal that it heeds."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.command, self.options = command, options
        self.pid = 4711
        self.returncode: int | None = None
        self.got: list[int] = []
        self.heeds: tuple[int, ...] = SIGNALS

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.got.append(number)
        if number in self.heeds:
            self.returncode = 0

    def kill(self) -> None:
        self.got.append(signal.SIGKILL)
        self.returncode = -9


class World:
    """A group whose waits are turns: each calls the next of `turns`, and moves the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.children: list[Child] = []
        self.turns: list[Callable[[], None]] = []
        self.now = 0.0
        monkeypatch.setattr(serve.subprocess, "Popen", self._start)
        monkeypatch.setattr(serve.time, "sleep", self._sleep)
        monkeypatch.setattr(serve.time, "monotonic", lambda: self.now)

    def _start(self, command: list[str], **options: Any) -> Child:
        self.children.append(Child(command, **options))
        return self.children[-1]

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.turns:
            self.turns.pop(0)()
        assert self.now < 1000, "it never ends"

    def run(self, *turns: Callable[[], None]) -> int:
        self.turns = list(turns)
        with socket.socket() as listener:
            return ProcessGroup(a_config(gateway={"drain_s": 5}), listener, 2).run()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield World(monkeypatch)
    for number, handler in before.items():
        signal.signal(number, handler)


def stop(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_the_processes_share_the_listener_and_follow_their_parent(world: World) -> None:
    assert world.run(stop) == 0
    assert len(world.children) == 2
    for child in world.children:
        assert child.command[1:4] == ["-m", "gateway", "serve"]
        fd, values = child.options["pass_fds"]
        assert child.options["env"][LISTENER_VARIABLE] == str(fd)
        assert child.options["env"][PARENT_VARIABLE] == str(os.getpid())
        assert child.options["start_new_session"]
        assert child.options["env"][SLOT_VARIABLE].split(":")[0] == str(values)
    assert [child.options["env"][SLOT_VARIABLE].split(":")[1] for child in world.children] == ["0", "1"]


def test_a_process_that_ends_unasked_is_replaced_whatever_its_code(world: World) -> None:
    def die() -> None:
        world.children[0].returncode = 0

    world.run(die, lambda: None, stop)
    assert len(world.children) == 3
    slots = [child.options["env"][SLOT_VARIABLE] for child in world.children]
    assert slots[2] == slots[0] != slots[1], "its totals are not lost"
    assert world.children[0].got == [] and world.children[2].got == [signal.SIGTERM]


def test_a_process_that_died_is_in_flight_with_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_and_die() -> None:
        for child in world.children:
            monkeypatch.setenv(SLOT_VARIABLE, child.options["env"][SLOT_VARIABLE])
            shared, slot = slot_from_environment()
            slot.take()
        assert shared.taken() == 2
        world.children[1].returncode = -9

    world.run(serve_and_die, lambda: None, stop)
    shared, dead = slot_from_environment()
    assert not dead.is_taken and shared.taken() == 1


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stop_is_passed_on_once(world: World, number: signal.Signals) -> None:
    assert world.run(lambda: stop(number)) == 0
    assert [child.got for child in world.children] == [[number], [number]]


def test_a_second_signal_is_passed_on_too(world: World) -> None:
    def first() -> None:
        for child in world.children:
            child.heeds = (signal.SIGINT,)
        stop()

    assert world.run(first, lambda: stop(signal.SIGINT)) == 0
    assert [child.got for child in world.children] == [[signal.SIGTERM, signal.SIGINT]] * 2


def test_what_does_not_end_within_the_drain_time_is_killed(world: World) -> None:
    def stuck() -> None:
        for child in world.children:
            child.heeds = ()
        stop()

    assert world.run(stuck) == 0
    assert [child.got for child in world.children] == [[signal.SIGTERM, signal.SIGKILL]] * 2
    assert world.now > 5


def test_a_process_whose_parent_is_dead_already_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "follow_parent", lambda: False)
    monkeypatch.setattr(serve, "listen", cast(Any, None))
    assert serve.serve(a_config()) == 0


def test_a_key_for_metrics_that_is_not_set_is_told_before_anything_is_started(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SCRAPE", raising=False)
    monkeypatch.setattr(serve, "listen", cast(Any, None))
    with pytest.raises(ConfigError) as raised:
        serve.serve(a_config(gateway={"processes": 2}, metrics={"key_env": "SCRAPE"}))
    assert "metrics.key_env" in raised.value.findings[0] and world.children == []


def test_a_gateway_may_open_as_many_files_as_the_system_lets_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        assert allow_open_files() == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
