from pathlib import Path

from gateway.config.load import LoadedConfig, parse
from workers.spec import WorkerSpec, specs_of


def loaded(tmp_path: Path, pools: dict, **sections: object) -> LoadedConfig:
    routes = {"r": {"targets": [{"pool": next(iter(pools))}]}}
    return parse({"pools": pools, "routes": routes, **sections}, tmp_path / "config.toml")


def one(tmp_path: Path, pool: dict, gpu_count: int = 0, **sections: object) -> WorkerSpec:
    (spec,) = specs_of(loaded(tmp_path, {"chat": pool}, **sections), "h1", gpu_count)
    return spec


def test_a_pool_gives_one_worker_per_replica_with_a_name_unique_in_the_fleet(tmp_path):
    config = loaded(tmp_path, {"chat": {"model": "org/m", "replicas": [{"gpus": [0]}, {"gpus": [1]}]}})
    assert [spec.id for spec in specs_of(config, "h1", 2)] == ["chat/0@h1", "chat/1@h1"]


def test_a_pool_of_urls_gives_no_worker(tmp_path):
    config = loaded(tmp_path, {"far": {"urls": ["http://10.0.0.7:8000"]}, "chat": {"model": "org/m"}})
    assert [spec.pool for spec in specs_of(config, "h1", 0)] == ["chat"]


def test_without_gpus_the_first_gpu_is_taken_where_there_is_one_else_the_cpu(tmp_path):
    assert one(tmp_path, {"model": "org/m"}, gpu_count=2).gpus == ("0",)
    assert one(tmp_path, {"model": "org/m"}, gpu_count=0).gpus == ()


def test_an_empty_gpu_list_forces_the_cpu(tmp_path):
    assert one(tmp_path, {"model": "org/m", "replicas": [{"gpus": []}]}, gpu_count=2).gpus == ()


def test_a_gpu_is_given_by_index_by_uuid_or_by_mig_uuid(tmp_path):
    for gpu in (3, "GPU-8a2b", "MIG-77c0"):
        assert one(tmp_path, {"model": "org/m", "replicas": [{"gpus": [gpu]}]}, gpu_count=4).gpus == (str(gpu),)


def test_a_hub_name_is_taken_as_it_is(tmp_path):
    spec = one(tmp_path, {"model": "Qwen/Qwen2.5-0.5B-Instruct"})
    assert (spec.model, spec.model_is_local) == ("Qwen/Qwen2.5-0.5B-Instruct", False)


def test_a_directory_beside_the_config_file_wins_over_a_hub_name(tmp_path):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    spec = one(tmp_path, {"model": "models/tiny"})
    assert (spec.model, spec.model_is_local) == (str(tmp_path / "models" / "tiny"), True)


def test_a_path_is_resolved_against_the_config_file_whether_it_exists_or_not(tmp_path):
    assert one(tmp_path, {"model": "./m"}).model == str(tmp_path / "m")
    assert one(tmp_path, {"model": "../m"}).model == str(tmp_path.parent / "m")
    assert one(tmp_path, {"model": "/data/m"}).model == "/data/m"
    assert one(tmp_path, {"model": "~/m"}).model == str(Path.home() / "m")


def test_the_served_name_is_the_pools_unless_given(tmp_path):
    assert one(tmp_path, {"model": "org/m"}).served_name == "chat"
    assert one(tmp_path, {"model": "org/m", "served_name": "big"}).served_name == "big"


def test_a_pools_environment_goes_over_that_of_all_workers(tmp_path):
    workers = {"env": {"A": "all", "B": "all"}}
    spec = one(tmp_path, {"model": "org/m", "env": {"B": "pool"}}, workers=workers)
    assert spec.env == {"A": "all", "B": "pool"}


def test_the_command_is_the_pools_own_vllm_else_the_common_one(tmp_path):
    workers = {"vllm": "venv/bin/vllm"}
    assert one(tmp_path, {"model": "org/m"}, workers=workers).vllm == str(tmp_path / "venv/bin/vllm")
    assert one(tmp_path, {"model": "org/m", "vllm": "/opt/v/bin/vllm"}, workers=workers).vllm == "/opt/v/bin/vllm"
    assert one(tmp_path, {"model": "org/m"}).vllm == "vllm"


def test_variables_that_hold_keys_of_callers_or_of_other_servers_are_hidden(tmp_path):
    assert one(tmp_path, {"model": "org/m"}, keys={"a": {"key_env": "ALICE_KEY"}}).hidden_env == {"ALICE_KEY"}
    assert one(tmp_path, {"model": "org/m"}, metrics={"key_env": "SCRAPE_KEY"}).hidden_env == {"SCRAPE_KEY"}
    pools = {"chat": {"model": "org/m"}, "cloud": {"urls": ["https://h"], "key_env": "CLOUD_KEY"}}
    (spec,) = specs_of(loaded(tmp_path, pools), "here", 0)
    assert spec.hidden_env == {"CLOUD_KEY"}


def test_options_keep_the_configs_names_and_values(tmp_path):
    pool = {
        "model": "org/m",
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "scheduling_policy": "priority",
        "vllm_args": {"enforce_eager": True},
    }
    spec = one(tmp_path, pool)
    assert dict(spec.options) == {
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "scheduling_policy": "priority",
        "enforce_eager": True,
    }
    assert spec.has_priority and spec.is_eager


def test_memory_share_is_zero_when_the_cache_is_sized_in_bytes_or_there_is_no_gpu(tmp_path):
    sized = {"model": "org/m", "vllm_args": {"kv_cache_memory_bytes": 2**30}}
    assert one(tmp_path, sized, gpu_count=1).memory_share == 0
    assert one(tmp_path, {"model": "org/m"}, gpu_count=0).memory_share == 0
    assert one(tmp_path, {"model": "org/m", "gpu_memory_utilization": 0.3}, gpu_count=1).memory_share == 0.3


def test_a_pool_name_with_slashes_makes_one_plain_file_name(tmp_path):
    (spec,) = specs_of(loaded(tmp_path, {"org/chat:v1": {"model": "org/m"}}), "h1", 0)
    assert "/" not in spec.file_stem and spec.log_path.parent == tmp_path / ".poolgate" / "logs"
