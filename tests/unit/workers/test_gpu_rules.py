from __future__ import annotations

import dataclasses

from fakes.preflight_facts import CARDS, MODEL, WHOLE, facts_of, the_one

from workers.finding import Severity
from workers.gpu import Card
from workers.gpu_rules import card_of, gpu_findings


def found(*args, **known):
    return list(gpu_findings(facts_of(*args, **known)))


def test_a_machine_that_has_the_gpus_gets_no_finding():
    assert found({"a": {"replicas": [{"gpus": [0]}, {"gpus": [CARDS[1].uuid]}]}}, cards=CARDS) == []


def test_an_index_that_no_card_has_is_an_error_that_lists_the_cards():
    finding = the_one(found({"a": {"replicas": [{"gpus": [7]}]}}, cards=CARDS), "pools.a.replicas[0].gpus")
    assert finding.severity is Severity.ERROR
    assert "no GPU 7" in finding.fact
    assert CARDS[0].uuid in finding.way_out and CARDS[1].uuid in finding.way_out


def test_an_unknown_uuid_is_an_error_that_names_card_models():
    finding = the_one(
        found({"a": {"replicas": [{"gpus": ["GPU-cccc"]}]}}, cards=CARDS, card_names={CARDS[0].uuid: "NVIDIA H200"}),
        "pools.a.replicas[0].gpus",
    )
    assert "no GPU GPU-cccc" in finding.fact
    assert "NVIDIA H200, 80000 MiB" in finding.way_out


def test_a_uuid_may_be_cut_short_where_one_card_alone_begins_so():
    assert card_of("GPU-aaaa", CARDS) is CARDS[0]
    assert card_of("GPU-", CARDS) is None


def test_a_mig_instance_is_known_by_its_uuid():
    known = {"cards": CARDS, "mig_uuids": frozenset({"MIG-1111"})}
    assert found({"a": {"replicas": [{"gpus": ["MIG-1111"]}]}}, **known) == []
    finding = the_one(found({"a": {"replicas": [{"gpus": ["MIG-2222"]}]}}, **known), "pools.a.replicas[0].gpus")
    assert "MIG-2222" in finding.fact
    assert "MIG-1111" in finding.way_out


def test_gpus_on_a_machine_without_nvidia_are_an_error():
    finding = the_one(found({"a": {"replicas": [{}, {"gpus": [0]}]}}), "pools.a.replicas[1].gpus")
    assert finding.severity is Severity.ERROR
    assert "shows no NVIDIA GPU" in finding.fact
    assert "remove gpus" in finding.way_out


def test_no_gpu_is_a_hint_where_nobody_asked_for_one():
    finding = the_one(found({"a": {}, "b": {}}), "pools")
    assert finding.severity is Severity.HINT
    assert "run on the CPU" in finding.fact


def test_a_pool_that_is_forced_to_the_cpu_needs_no_hint():
    assert found({"a": {"replicas": [{"gpus": []}]}}) == []


def test_a_config_without_workers_needs_no_gpu():
    assert found({"a": {"urls": ["http://127.0.0.1:1"]}}) == []


def test_devices_that_nvidia_smi_does_not_list_are_a_warning():
    finding = the_one(found({"a": {}}, has_hidden_gpus=True), "pools")
    assert finding.severity is Severity.WARNING
    assert "nvidia-smi -L" in finding.way_out


def test_more_tensor_parallel_ranks_than_cards():
    finding = the_one(found({"a": {"tensor_parallel_size": 4}}, cards=CARDS), "pools.a.tensor_parallel_size")
    assert finding.severity is Severity.ERROR
    assert finding.fact == "4 GPUs are needed, this machine has 2"
    assert "number of GPUs that is there" in finding.way_out


def test_two_workers_on_one_gpu_by_default_are_told_when_their_shares_do_not_fit():
    finding = the_one(found({"a": {}, "b": {"gpu_memory_utilization": 0.3}}, cards=CARDS), "pools.b.replicas[0].gpus")
    assert finding.severity is Severity.ERROR
    assert "sum to 1.22" in finding.fact and "pools.a.replicas[0].gpus (share 0.92)" in finding.fact
    assert "lower gpu_memory_utilization" in finding.way_out


def test_index_and_uuid_of_one_card_are_seen_as_one_card():
    pools = {"a": {"replicas": [{"gpus": [0]}]}, "b": {"replicas": [{"gpus": [CARDS[0].uuid]}]}}
    assert the_one(found(pools, cards=CARDS), "pools.b.replicas[0].gpus").severity is Severity.ERROR


def test_shares_that_fit_and_caches_sized_in_bytes_may_share_a_card():
    half = {"gpu_memory_utilization": 0.49}
    assert found({"a": half, "b": half}, cards=CARDS) == []
    assert found({"a": {}, "b": {"vllm_args": {"kv_cache_memory_bytes": 1}}}, cards=CARDS) == []


def test_memory_that_others_hold_is_a_warning_that_names_them():
    busy = (Card("0", "GPU-a", 80_000, 50_000, ("pid 812 (49000 MiB)",)),)
    finding = the_one(found({"a": {}}, cards=busy), "pools.a.replicas[0].gpus")
    assert finding.severity is Severity.WARNING
    assert "30000 of 80000 MiB are free" in finding.fact and "pid 812 (49000 MiB)" in finding.fact
    assert "end them" in finding.way_out


def test_weights_larger_than_the_share_of_the_cards_are_a_warning():
    large = dataclasses.replace(WHOLE, weights_bytes=140 * 2**30)
    one = the_one(found({"a": {}}, cards=CARDS, models={MODEL: large}), "pools.a.model")
    assert one.severity is Severity.WARNING
    assert "140.0 GiB" in one.fact and "71.9 GiB" in one.fact
    assert "quantized" in one.way_out
    assert found({"a": {"tensor_parallel_size": 2}}, cards=CARDS, models={MODEL: large}) == []


def test_weights_of_all_cpu_workers_together_are_held_against_the_memory():
    models = {MODEL: dataclasses.replace(WHOLE, weights_bytes=5 * 2**30)}
    told = found({"a": {}, "b": {}, "c": {}}, models=models, memory_bytes=8 * 2**30)
    finding = the_one(told, "pools.b.model")
    assert finding.severity is Severity.WARNING
    assert "10.0 GiB" in finding.fact and "8.0 GiB" in finding.fact
    assert "fewer workers" in finding.way_out
