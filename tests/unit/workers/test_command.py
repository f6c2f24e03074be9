from dataclasses import replace
from pathlib import Path

import pytest

from workers.command import MAX_RUN_FOLDER_BYTES, Launch, flags_of, launch_of, run_folder
from workers.spec import WorkerSpec

SPEC = WorkerSpec(
    id="chat/0@h1",
    pool="chat",
    number=0,
    vllm="vllm",
    model="/m/tiny",
    model_is_local=True,
    served_name="chat",
    state_dir=Path("/s"),
)


def launch(spec: WorkerSpec = SPEC, **parent_env: str) -> Launch:
    return launch_of(
        spec,
        port=23456,
        internal_port=12000,
        engine_key="engine-secret",
        nonce="abc123",
        temp_folder=Path("/tmp"),
        parent_env=parent_env,
    )


@pytest.mark.parametrize(
    ("name", "value", "flags"),
    [
        ("max_model_len", 4096, ["--max-model-len", "4096"]),
        ("gpu_memory_utilization", 0.85, ["--gpu-memory-utilization", "0.85"]),
        ("enforce_eager", True, ["--enforce-eager"]),
        ("enable_prefix_caching", False, ["--no-enable-prefix-caching"]),
        ("middleware", ["a.B", "c.D"], ["--middleware", "a.B", "c.D"]),
        ("middleware", [], []),
        ("compilation_config", {"mode": 3}, ["--compilation-config", '{"mode": 3}']),
        ("lora_modules", [{"name": "x"}], ["--lora-modules", '{"name": "x"}']),
        ("chat-template", "a b.jinja", ["--chat-template", "a b.jinja"]),
        ("--seed", -1, ["--seed=-1"]),
    ],
)
def test_an_option_becomes_arguments(name, value, flags):
    assert list(flags_of(name, value)) == flags


def test_argv_serves_the_model_under_its_name_on_loopback():
    spec = replace(SPEC, options=(("dtype", "bfloat16"), ("enforce_eager", True)))
    assert launch(spec).argv == (
        *("vllm", "serve", "/m/tiny", "--served-model-name", "chat"),
        *("--host", "127.0.0.1", "--port", "23456", "--dtype", "bfloat16", "--enforce-eager"),
    )


def test_the_engine_key_is_not_on_the_command_line():
    started = launch()
    assert not any("engine-secret" in arg for arg in started.argv)
    assert started.env["VLLM_API_KEY"] == "engine-secret"


def test_a_worker_sees_neither_poolgates_variables_nor_callers_keys():
    env = launch(
        replace(SPEC, hidden_env=frozenset({"ALICE_KEY"})),
        POOLGATE_ADMIN_KEY="s1",
        POOLGATE_REDIS__URL="redis://:s2@h",
        ALICE_KEY="s3",
        HF_TOKEN="needed",
    ).env
    assert not {"s1", "redis://:s2@h", "s3"} & set(env.values())
    assert env["HF_TOKEN"] == "needed"


def test_cpu_workers_see_no_gpu_whatever_the_supervisor_sees():
    assert launch(CUDA_VISIBLE_DEVICES="2,3").env["CUDA_VISIBLE_DEVICES"] == ""


def test_gpu_workers_see_theirs_by_index_in_pci_order_or_by_uuid_whatever_the_supervisor_sees():
    for gpus in (("0", "1"), ("GPU-8a2b",), ("MIG-77c0",)):
        env = launch(replace(SPEC, gpus=gpus), CUDA_VISIBLE_DEVICES="7").env
        assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == (",".join(gpus), "PCI_BUS_ID")


def test_the_hub_is_off_only_for_local_models():
    assert launch().env["HF_HUB_OFFLINE"] == launch().env["TRANSFORMERS_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in launch(replace(SPEC, model="org/m", model_is_local=False)).env


def test_an_eager_cpu_worker_does_not_compile_unless_told():
    eager = replace(SPEC, options=(("enforce_eager", True),))
    assert launch(eager).env["TORCH_COMPILE_DISABLE"] == "1"
    assert launch(replace(eager, env={"TORCH_COMPILE_DISABLE": "0"})).env["TORCH_COMPILE_DISABLE"] == "0"
    assert "TORCH_COMPILE_DISABLE" not in launch().env
    assert "TORCH_COMPILE_DISABLE" not in launch(replace(eager, gpus=("0",))).env


def test_the_configs_environment_wins_over_the_inherited_one_but_not_over_what_keeps_workers_apart():
    env = launch(replace(SPEC, env={"OMP_NUM_THREADS": "2", "VLLM_API_KEY": "known"}), OMP_NUM_THREADS="8").env
    assert (env["OMP_NUM_THREADS"], env["VLLM_API_KEY"]) == ("2", "engine-secret")


def test_shared_compile_cache_broken_by_parallel_starts():
    roots = {launch(replace(SPEC, number=n)).env["VLLM_CACHE_ROOT"] for n in range(3)}
    assert len(roots) == 3
    assert launch(VLLM_CACHE_ROOT="/big").env["VLLM_CACHE_ROOT"] == "/big/chat-0"


def test_temporary_files_and_sockets_go_to_the_private_folder_of_the_start():
    started = launch()
    assert started.run_folder == Path("/s/run/abc123")
    assert started.env["TMPDIR"] == started.env["VLLM_RPC_BASE_PATH"] == "/s/run/abc123"


def test_a_long_state_directory_does_not_make_socket_paths_too_long():
    for temp in ("/tmp", "/t" * 60):
        path = run_folder(Path("/x" * 60), Path(temp), "abc123")
        assert len(str(path)) <= MAX_RUN_FOLDER_BYTES
        assert path.name.endswith("abc123")


def test_two_state_directories_do_not_share_a_temporary_folder():
    assert run_folder(Path("/x" * 60), Path("/tmp"), "n") != run_folder(Path("/y" * 60), Path("/tmp"), "n")


def test_the_tools_of_vllms_own_venv_are_on_the_workers_path():
    assert launch(replace(SPEC, vllm="/opt/v/bin/vllm"), PATH="/usr/bin").env["PATH"] == "/opt/v/bin:/usr/bin"
    assert launch(PATH="/usr/bin").env["PATH"] == "/usr/bin"
