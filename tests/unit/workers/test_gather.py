from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gateway.config.load import parse
from workers.gather import look_at_command, look_at_state_dir, nvidia_names, overrides
from workers.spec import WorkerSpec, specs_of

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-8932f937-d72c-4106-c12f-20bd9faed9f6)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 2g.10gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
"""


def spec_with(vllm: str, directory: Path) -> WorkerSpec:
    data = {
        "workers": {"vllm": vllm},
        "pools": {"a": {"model": "org/name"}},
        "routes": {"r": {"targets": [{"pool": "a"}]}},
    }
    return specs_of(parse(data, directory / "config.toml"), "here", 0)[0]


def test_names_and_mig_instances_are_read_from_nvidia_smi():
    names, mig = nvidia_names(LISTING)
    assert names == {
        "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6": "NVIDIA H200",
        "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f": "NVIDIA A100-SXM4-40GB",
    }
    assert mig == {"MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb"}
    assert nvidia_names("No devices found.\n") == ({}, frozenset())


def test_a_command_is_looked_up_on_path(tmp_path, monkeypatch):
    command = tmp_path / "vllm"
    monkeypatch.setenv("PATH", str(tmp_path))
    trouble = look_at_command(spec_with("vllm", tmp_path))
    assert trouble is not None and trouble.fact == 'no command "vllm" on PATH'
    assert "venv" in trouble.way_out
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    assert look_at_command(spec_with("vllm", tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "mode", "fact", "way_out"),
    [
        ("#!/bin/sh\n", 0o644, "is not executable", "chmod +x"),
        ("#!/no/such/python3\n", 0o755, "wants /no/such/python3, which does not exist", "make its venv anew"),
    ],
    ids=["mode", "interpreter"],
)
def test_a_command_that_is_there_but_cannot_be_run(tmp_path, text, mode, fact, way_out):
    (tmp_path / "vllm").write_text(text)
    (tmp_path / "vllm").chmod(mode)
    trouble = look_at_command(spec_with("./vllm", tmp_path))
    assert trouble is not None
    assert fact in trouble.fact and way_out in trouble.way_out


def test_a_command_that_is_missing_or_a_directory(tmp_path):
    trouble = look_at_command(spec_with("./vllm", tmp_path))
    assert trouble is not None and trouble.fact == f"{tmp_path}/vllm does not exist"
    (tmp_path / "vllm").mkdir()
    trouble = look_at_command(spec_with("./vllm", tmp_path))
    assert trouble is not None and "bin/vllm" in trouble.way_out


def test_a_state_directory_may_be_there_or_be_made(tmp_path):
    assert look_at_state_dir(tmp_path) is None
    assert look_at_state_dir(tmp_path / "not" / "yet") is None


def test_a_file_in_place_of_the_state_directory(tmp_path):
    (tmp_path / "file").touch()
    trouble = look_at_state_dir(tmp_path / "file")
    assert trouble is not None and trouble.fact.endswith("is a file") and "gateway.state_dir" in trouble.way_out
    trouble = look_at_state_dir(tmp_path / "file" / "below")
    assert trouble is not None and "cannot be made" in trouble.fact


@pytest.mark.parametrize(("below", "verb"), [("", "written to"), ("new", "made")])
def test_a_state_directory_that_this_user_may_not_write(tmp_path, monkeypatch, below, verb):
    # tests may run as root, who may write everywhere: answer for a user who may not
    def access(path, mode):
        return bool(os.stat(path).st_mode & stat.S_IWUSR)

    monkeypatch.setattr(os, "access", access)
    tmp_path.chmod(0o555)
    trouble = look_at_state_dir(tmp_path / below)
    tmp_path.chmod(0o755)
    assert trouble is not None and f"cannot be {verb} by this user" in trouble.fact


def test_overrides_are_told_by_name_never_by_value():
    environ = {
        "POOLGATE_REDIS__URL": "redis://:secret@host",
        "poolgate_gateway__timeouts__gap_s": "3",
        "POOLGATE_CONFIG_FILE": "x",
        "PATH": "y",
    }
    assert overrides(environ) == [
        ("POOLGATE_REDIS__URL", "redis.url"),
        ("poolgate_gateway__timeouts__gap_s", "gateway.timeouts.gap_s"),
    ]
