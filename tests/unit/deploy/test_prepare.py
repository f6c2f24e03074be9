"""What a command and a config need: decided before anything is installed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from deploy.demo import steps
from deploy.demo.prepare import Wanted, wanted_for
from deploy.demo.steps import CPU, NVIDIA, ROOT

SHIPPED = tomllib.loads((ROOT / "config.toml").read_text())


@pytest.mark.parametrize(("has_gpu", "device"), [(False, CPU), (True, NVIDIA)])
def test_the_shipped_config_needs_the_demo_model_and_the_vllm_of_the_machine(has_gpu: bool, device: str) -> None:
    assert wanted_for("serve", SHIPPED, has_gpu=has_gpu) == Wanted(ROOT / ".venv-vllm", device, has_demo_model=True)


def test_an_unreadable_config_gets_the_demo_so_that_poolgate_can_tell_what_is_wrong() -> None:
    assert wanted_for("serve", {}, has_gpu=False) == Wanted(ROOT / ".venv-vllm", CPU, has_demo_model=True)


def test_a_config_with_another_vllm_and_model_installs_none_of_ours() -> None:
    config = {"workers": {"vllm": "/opt/vllm/bin/vllm"}, "pools": {"qwen": {"model": "Qwen/Qwen2.5-0.5B-Instruct"}}}
    assert wanted_for("serve", config, has_gpu=True).vllm is None


def test_a_hub_model_on_our_vllm_needs_vllm_but_no_demo_model() -> None:
    config = {"workers": {"vllm": "./.venv-vllm/bin/vllm"}, "pools": {"qwen": {"model": "Qwen/Qwen2.5-0.5B-Instruct"}}}
    wanted = wanted_for("serve", config, has_gpu=False)
    assert (wanted.vllm, wanted.has_demo_model) == (ROOT / ".venv-vllm", False)


def test_one_pool_on_our_vllm_is_enough_to_need_it() -> None:
    pools = {"old": {"model": "/m/a"}, "new": {"model": "/m/a", "vllm": ".venv-vllm/bin/vllm"}}
    assert wanted_for("serve", {"workers": {"vllm": "vllm"}, "pools": pools}, has_gpu=False).vllm is not None


def test_a_gateway_in_front_of_others_servers_needs_no_vllm() -> None:
    pools = {"elsewhere": {"urls": ["http://10.0.0.7:8000"]}}
    assert wanted_for("serve", {"pools": pools}, has_gpu=True).vllm is None


def test_tests_take_the_cpu_build_beside_the_one_that_serves_on_a_gpu() -> None:
    assert wanted_for("test", SHIPPED, has_gpu=True) == Wanted(ROOT / ".venv-vllm-cpu", CPU, True, True)
    assert wanted_for("test", SHIPPED, has_gpu=False).vllm == ROOT / ".venv-vllm"


def test_linting_needs_the_gateway_alone() -> None:
    assert wanted_for("check", SHIPPED, has_gpu=True) == Wanted()


def test_the_shipped_config_names_what_the_set_up_makes() -> None:
    paths = {SHIPPED["workers"]["vllm"], *(pool["model"] for pool in SHIPPED["pools"].values())}
    assert paths == {".venv-vllm/bin/vllm", ".poolgate/models/SmolLM2-135M-Instruct"}
    assert not Path(SHIPPED["workers"]["vllm"]).is_absolute()


def test_programs_that_tests_run_are_wanted_by_their_packages_until_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(steps, "TEST_PROGRAMS", {"there-for-tests": "a-package", "absent-for-tests": "another"})
    (tmp_path / "there-for-tests").touch(mode=0o755)
    assert steps.missing_test_programs() == ["another"]
