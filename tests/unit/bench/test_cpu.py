"""Times and parents of processes as the kernel tells them."""

from __future__ import annotations

import os
import time

import pytest

from bench.cpu import cpu_s, parent_in, rss_bytes, tree


@pytest.mark.parametrize("name", ["python", "a b", "x) R 99 (y", ")"])
def test_a_process_name_with_blanks_and_parentheses_does_not_shift_the_fields(name: str) -> None:
    assert parent_in(f"77 ({name}) S 42 77 77 0 -1") == 42


def test_cpu_time_is_that_of_the_process_clock() -> None:
    before = time.process_time()
    seen = cpu_s([os.getpid()])
    assert before <= seen <= time.process_time()


def test_a_process_that_is_gone_is_an_error_and_not_zero() -> None:
    pid = os.spawnv(os.P_NOWAIT, "/bin/true", ["true"])
    os.waitpid(pid, 0)
    with pytest.raises(OSError):
        cpu_s([pid])


def test_the_tree_holds_the_root_and_its_descendants() -> None:
    assert os.getpid() in tree([os.getppid()])
    assert tree([os.getpid()])[0] == os.getpid()


def test_resident_memory_is_in_bytes() -> None:
    assert rss_bytes([os.getpid()]) > 5_000_000
