"""What the machine has and allows, told without touching it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from deploy.demo.machine import SetupError, apt_get, has_nvidia_gpu, is_held, only_one, require_space


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it, to put programs in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def a_program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_machine_without_driver_and_tool_has_no_gpu(empty_path: Path, tmp_path: Path) -> None:
    assert not has_nvidia_gpu(tmp_path / "absent")


def test_the_drivers_list_shows_a_gpu(empty_path: Path, tmp_path: Path) -> None:
    (tmp_path / "gpus/0000:01:00.0").mkdir(parents=True)
    assert has_nvidia_gpu(tmp_path / "gpus")


def test_nvidia_smi_shows_a_gpu_where_proc_is_hidden(empty_path: Path, tmp_path: Path) -> None:
    a_program(empty_path, "nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'")
    assert has_nvidia_gpu(tmp_path / "absent")


def test_a_tool_without_a_working_driver_is_no_gpu(empty_path: Path, tmp_path: Path) -> None:
    a_program(empty_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert not has_nvidia_gpu(tmp_path / "absent")


def test_too_little_disk_is_told_before_anything_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"vLLM needs about 1000000000\.0 GB of disk, and .* GB free"):
        require_space(tmp_path, 10**18, "vLLM")
    require_space(tmp_path, 1, "vLLM")


def test_a_machine_without_apt_is_not_asked(empty_path: Path) -> None:
    assert apt_get() is None


def test_apt_is_run_through_sudo_only_where_sudo_asks_nothing(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    a_program(empty_path, "apt-get", "exit 0")
    assert apt_get() is None
    a_program(empty_path, "sudo", "exit 1")
    assert apt_get() is None
    a_program(empty_path, "sudo", "exit 0")
    assert (apt_get() or [])[:2] == ["sudo", "-n"]


def test_a_lock_is_held_as_long_as_somebody_has_it(tmp_path: Path) -> None:
    lock = tmp_path / "up.lock"
    assert not is_held(lock)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_held(lock)
    assert not is_held(lock)


def test_a_second_set_up_says_whom_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.demo.machine.LOCK_WAIT_S", -1.0)
    said: list[str] = []
    with only_one(tmp_path / "lock", said.append), pytest.raises(SetupError, match="still runs"):  # noqa: SIM117
        with only_one(tmp_path / "lock", said.append):
            pass
    assert said == [f"another set-up of this checkout is running (pid {os.getpid()}); waited 0 s for it"]
    with only_one(tmp_path / "lock", said.append):
        assert len(said) == 1
