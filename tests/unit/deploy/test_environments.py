"""What is whole is recognised, what is not is made anew, and what is not ours is never deleted."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from deploy.demo.environments import STAMP, Made, key_of, pinned, vllm_range, without, write_vllm_metadata
from deploy.demo.steps import CPU_LOCK, LOCK, PYPROJECT


def an_environment(path: Path, key: str = "k1") -> Made:
    """What `python -m venv` and pip leave behind, as far as it matters here."""
    made = Made(path, key)
    made.begin()
    (path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (path / "bin").mkdir()
    (path / "bin/python").write_text("")
    (path / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages").mkdir(parents=True)
    return made


def test_an_interrupted_environment_is_not_ready_and_is_made_from_nothing(tmp_path: Path) -> None:
    made = an_environment(tmp_path / "venv")
    assert not made.is_ready and not made.is_outdated and not made.is_foreign
    made.begin()
    assert [entry.name for entry in made.path.iterdir()] == [STAMP]


def test_a_finished_environment_is_ready_for_its_inputs_only(tmp_path: Path) -> None:
    an_environment(tmp_path / "venv", "k1").finish()
    assert Made(tmp_path / "venv", "k1").is_ready
    assert not Made(tmp_path / "venv", "k2").is_ready
    assert Made(tmp_path / "venv", "k2").is_outdated


def test_an_update_keeps_what_is_there_and_is_unfinished_until_it_ends(tmp_path: Path) -> None:
    an_environment(tmp_path / "venv", "k1").finish()
    newer = Made(tmp_path / "venv", "k2")
    newer.begin(keep=True)
    assert (newer.path / "bin/python").exists()
    assert not newer.is_ready and not newer.is_outdated
    newer.finish()
    assert newer.is_ready and not newer.is_foreign


def test_an_environment_that_failed_its_first_run_is_not_installed_again(tmp_path: Path) -> None:
    made = an_environment(tmp_path / "venv", "k1")
    assert not made.is_untried
    made.installed()
    assert made.is_untried and not made.is_ready
    assert not Made(made.path, "k2").is_untried


def test_an_environment_whose_python_went_away_is_made_anew(tmp_path: Path) -> None:
    made = an_environment(tmp_path / "venv")
    made.finish()
    (made.path / "bin/python").unlink()
    assert not made.is_ready and not made.is_outdated


def test_a_deletion_that_was_interrupted_is_still_known_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = an_environment(tmp_path / "venv")
    monkeypatch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        made.begin()
    assert (made.path / STAMP).exists() and not made.is_foreign


def test_somebody_elses_folder_keeps_everything(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/mine.txt").write_text("precious")
    made = Made(tmp_path / "venv", "k")
    assert made.is_foreign
    made.begin()
    made.finish()
    assert (made.path / "mine.txt").read_text() == "precious"
    assert made.is_ready and made.is_foreign


def test_a_link_is_not_followed_to_delete(tmp_path: Path) -> None:
    target = an_environment(tmp_path / "shared")
    target.finish()
    (tmp_path / "venv").symlink_to(tmp_path / "shared")
    linked = Made(tmp_path / "venv", "other")
    assert linked.is_foreign
    linked.begin()
    assert (tmp_path / "shared/bin/python").exists()


def test_a_folder_made_aside_replaces_the_old_one_whole(tmp_path: Path) -> None:
    (tmp_path / "tmp/model").mkdir(parents=True)
    (tmp_path / "tmp/model/config.json").write_text("new")
    old = Made(tmp_path / "models/model", "k1")
    old.begin()
    (old.path / "leftover").write_text("old")
    Made(old.path, "k2").publish(tmp_path / "tmp/model")
    assert Made(old.path, "k2").is_ready
    assert sorted(entry.name for entry in old.path.iterdir()) == ["config.json", STAMP]


def test_the_key_changes_with_each_input_and_not_with_how_they_are_cut(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("a==1\n")
    assert key_of("x", tmp_path / "lock") == key_of("x", tmp_path / "lock")
    before = key_of("x", tmp_path / "lock")
    (tmp_path / "lock").write_text("a==2\n")
    assert key_of("x", tmp_path / "lock") != before
    assert key_of("ab", "c") != key_of("a", "bc")


def test_vllm_finds_itself_in_an_environment_with_the_cpu_build(tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.11/site-packages"
    site.mkdir(parents=True)
    write_vllm_metadata(tmp_path, "0.32.0")
    found = PathDistribution(site / "vllm-0.32.0+cpu.dist-info")
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
    assert [str(file) for file in found.files or []] == [
        f"vllm-0.32.0+cpu.dist-info/{name}" for name in ("METADATA", "INSTALLER", "RECORD")
    ]


def test_torch_is_taken_out_of_the_frozen_set_and_nothing_else() -> None:
    lock = CPU_LOCK.read_text()
    assert pinned(lock, "torch").endswith("+cpu")
    removed = set(lock.splitlines()) - set(without(lock, ["torch"]).splitlines())
    assert removed == {f"torch=={pinned(lock, 'torch')}"}


def test_a_package_that_is_not_pinned_is_told() -> None:
    with pytest.raises(KeyError):
        pinned("torch==2\n", "torchvision")


def test_the_lock_pins_every_dependency_that_pyproject_names() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {line.split(";")[0].split("[")[0].split(">")[0].split("=")[0].strip() for line in named}
    assert [name for name in sorted(names) if not pinned(LOCK.read_text(), name)] == []


def test_the_vllm_of_a_gpu_machine_is_the_range_that_pyproject_names() -> None:
    assert vllm_range(PYPROJECT).startswith("vllm>=")
