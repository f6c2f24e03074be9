"""What happens when a test passes its deadline; registered by `tests/conftest.py`, which pytest-timeout asks first.

pytest-timeout would raise in the signal's handler: uvloop swallows that, asyncio may give it to any task, and the stack
that is told is the loop's own `select`. So a running loop is stopped instead, with each of its tasks told where it
stands. Teardown gets a deadline anew. What even that cannot end, code that does not come back from C or takes every
exception for its own, is ended with its process, and the stacks of its threads go to stderr: with xdist another worker
takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any

import pytest
from pytest_timeout import is_debugging

AGAIN_S = 5.0  # between two strikes
GIVE_UP_S = 30.0  # after the first strike the process ends

_settings = pytest.StashKey[Any]()
_stacks = pytest.StashKey[str]()
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # before a test's output is captured


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """pytest-timeout calls it when a test begins; `settings.timeout` is in seconds."""
    item.stash[_settings] = settings
    strikes = 0

    def strike(signum: int, frame: FrameType | None) -> None:
        nonlocal strikes
        if is_debugging():
            faulthandler.cancel_dump_traceback_later()
            return
        strikes += 1
        loop = _running_loop()
        if strikes == 1:
            item.stash[_stacks] = _stacks_told(loop)
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)
                return
        pytest.fail(f"it is not over after {settings.timeout:g} s")

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN_S)
    faulthandler.dump_traceback_later(settings.timeout + GIVE_UP_S, file=item.config.stash[_stderr], exit=True)
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    """pytest-timeout calls it when a test has failed, and when it is over."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A failure has ended the deadline; what its fixtures still hold may hang as well."""
    settings = item.stash.get(_settings, None)
    if settings is not None:
        pytest_timeout_set_timer(item, settings)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if stacks := item.stash.get(_stacks, ""):
        report.sections.append((f"where it stood after {item.stash[_settings].timeout:g} s", stacks))
        item.stash[_stacks] = ""
    return report


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def _stacks_told(loop: asyncio.AbstractEventLoop | None) -> str:
    """Where each task of the loop stands, and each thread but this one, whose stack the report has."""
    told: list[str] = []
    for task in () if loop is None else asyncio.all_tasks(loop):
        told += [f"{task.get_name()}:\n", *traceback.StackSummary.extract(_awaiting(task.get_coro())).format()]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            told += [f"{names.get(ident, ident)}:\n", *traceback.format_stack(frame)]
    return "".join(told)


def _awaiting(awaited: Any) -> Iterator[tuple[FrameType, int]]:
    """The frames from a task's outermost coroutine to the one that waits; its own `get_stack` gives the first alone."""
    while awaited is not None:
        if inspect.iscoroutine(awaited):
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif inspect.isasyncgen(awaited):
            frame, awaited = awaited.ag_frame, awaited.ag_await
        else:  # a step of an asynchronous generator, as fixtures are, names it to nobody but the collector
            awaited = next(filter(inspect.isasyncgen, gc.get_referents(awaited)), None)
            continue
        if frame is not None:
            yield frame, frame.f_lineno
