"""A test that hangs fails by its deadline and tells where it stood; the tests behind it still run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

LOOPS = """
import asyncio
import uvloop

pytest_plugins = ["plugins.deadlines"]


def pytest_asyncio_loop_factories(config, item):
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
"""

HANGING = """
import asyncio
import threading
from collections.abc import AsyncIterator

import pytest


async def never() -> None:
    await asyncio.Event().wait()  # here


async def test_awaits() -> None:
    await never()


async def spin() -> None:
    while True:
        await asyncio.sleep(0)


async def test_awaits_beside_a_task_that_spins() -> None:
    spinning = asyncio.create_task(spin())
    await never()


@pytest.fixture
async def no_end() -> AsyncIterator[None]:
    yield
    await asyncio.Event().wait()  # the end


async def test_fails_and_its_fixture_hangs(no_end: None) -> None:
    raise AssertionError("first")


def test_blocks() -> None:
    threading.Event().wait()  # blocked


def test_behind_them() -> None:
    pass
"""


def run(folder: Path, *arguments: str) -> str:
    """What pytest says of a folder with the tests above, each with a second to run."""
    (folder / "test_hanging.py").write_text(HANGING)
    (folder / "conftest.py").write_text(LOOPS)
    command = [sys.executable, "-m", "pytest", f"--rootdir={folder}", f"--config-file={ROOT / 'pyproject.toml'}"]
    command += ["--override-ini", f"pythonpath={ROOT / 'tests'}", "-p", "no:cacheprovider", "--timeout", "1"]
    done = subprocess.run(
        [*command, *arguments, str(folder)], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    return done.stdout


def test_hanging_tests_fail_one_by_one_and_tell_where_they_stood(tmp_path: Path) -> None:
    told = run(tmp_path)
    assert "7 failed, 1 passed, 2 errors in " in told
    assert told.count("await asyncio.Event().wait()  # here") == 4
    assert told.count("await asyncio.Event().wait()  # the end") == 2
    assert "threading.Event().wait()  # blocked" in told


def test_workers_that_run_side_by_side_tell_as_much(tmp_path: Path) -> None:
    told = run(tmp_path, "-n", "2", "-k", "awaits or behind")
    assert "4 failed, 1 passed in " in told
    assert told.count("await asyncio.Event().wait()  # here") == 4
