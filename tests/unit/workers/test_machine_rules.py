from __future__ import annotations

import pytest
from fakes.preflight_facts import facts_of, the_one

from workers.facts import PortUse, Trouble
from workers.finding import Part, Severity
from workers.machine_rules import machine_findings
from workers.preflight import findings

A_KEY = "a" * 64


def found(sections=None, pools=None, **known):
    return list(machine_findings(facts_of(pools or {"a": {}}, sections, **known)))


def test_a_machine_that_lacks_nothing_gets_no_finding():
    assert found() == []


@pytest.mark.parametrize(
    ("pools", "key"),
    [({"a": {}, "b": {}}, "workers.vllm"), ({"a": {"vllm": "/opt/vllm"}}, "pools.a.vllm")],
    ids=["of all", "of a pool"],
)
def test_a_vllm_command_that_cannot_be_run_is_told_once_where_it_is_set(pools, key):
    trouble = Trouble("it does not exist", "install it")
    finding = the_one(found(pools=pools, commands={"vllm": trouble, "/opt/vllm": trouble}), key)
    assert (finding.severity, finding.part) == (Severity.ERROR, Part.WORKERS)
    assert (finding.fact, finding.way_out) == (trouble.fact, trouble.way_out)


def test_a_taken_port_names_the_process_that_holds_it():
    finding = the_one(found(port=PortUse("taken", pid=812, program="nginx")), "gateway.port")
    assert (finding.severity, finding.part) == (Severity.ERROR, Part.GATEWAY)
    assert finding.fact == "8080 on 127.0.0.1 is taken by pid 812 (nginx)"
    assert "another port" in finding.way_out


def test_a_taken_port_whose_holder_cannot_be_seen():
    assert "a process of another user" in the_one(found(port=PortUse("taken")), "gateway.port").fact


@pytest.mark.parametrize("bound", [{"max_in_flight": 64}, {"max_in_flight": None, "max_num_seqs": 64}])
def test_a_pool_that_is_sent_whatever_comes_gets_a_hint(bound):
    free = {"urls": ["http://10.0.0.1:8000"], "max_in_flight": None}
    finding = the_one(findings(facts_of({"a": bound, "b": free})), "pools.b.max_in_flight")
    assert finding.severity is Severity.HINT
    assert "all are sent to the engine at once" in finding.fact


def test_a_port_that_this_very_gateway_holds_is_a_hint():
    finding = the_one(found(port=PortUse("taken", pid=5, program="poolgate", is_ours=True)), "gateway.port")
    assert finding.severity is Severity.HINT
    assert "pid 5" in finding.fact


def test_a_port_that_needs_a_privilege():
    finding = the_one(found(port=PortUse("forbidden", "Permission denied")), "gateway.port")
    assert "Permission denied" in finding.fact
    assert "1024" in finding.way_out


def test_a_host_that_this_machine_does_not_have():
    finding = the_one(found(port=PortUse("address", "Cannot assign requested address")), "gateway.host")
    assert finding.severity is Severity.ERROR
    assert '"0.0.0.0"' in finding.way_out


def test_redis_that_cannot_be_used():
    finding = the_one(found(redis=Trouble("it is away", "start it")), "redis.url")
    assert (finding.severity, finding.part, finding.way_out) == (Severity.ERROR, Part.REDIS, "start it")


def test_a_state_directory_that_cannot_be_written_stops_every_part():
    finding = the_one(found(state_dir=Trouble("it is a file", "remove it")), "gateway.state_dir")
    assert (finding.severity, finding.part, finding.way_out) == (Severity.ERROR, Part.HOST, "remove it")


def test_a_key_whose_variable_is_unset_is_off():
    sections = {"keys": {"k": {"key_env": "K"}}}
    finding = the_one(found(sections, unset_variables=frozenset({"K"})), "keys.k.key_env")
    assert finding.severity is Severity.WARNING
    assert "the key is off" in finding.fact
    assert "sha256" in finding.way_out
    assert found(sections) == []


def test_metrics_whose_key_is_unset_keep_the_gateway_from_starting():
    sections = {"metrics": {"key_env": "SCRAPE"}}
    finding = the_one(found(sections, unset_variables=frozenset({"SCRAPE"})), "metrics.key_env")
    assert (finding.severity, finding.part) == (Severity.ERROR, Part.GATEWAY)
    assert "SCRAPE is not set" in finding.fact
    assert found(sections) == []


def test_what_a_pool_of_others_does_not_get_stops_the_gateway_and_no_worker():
    pools = {"cloud": {"urls": ["https://h"], "key_env": "K"}}
    finding = the_one(
        found(pools=pools, outside=(("pools.cloud.key_env", Trouble("unset", "set it")),)), "pools.cloud.key_env"
    )
    assert (finding.severity, finding.part) == (Severity.ERROR, Part.GATEWAY)
    assert (finding.fact, finding.way_out) == ("unset", "set it")


def test_two_names_for_one_key():
    sections = {"keys": {"k": {"sha256": A_KEY}, "l": {"key_env": "L"}}}
    finding = the_one(found(sections, key_digests={"k": A_KEY, "l": A_KEY}), "keys.l")
    assert finding.severity is Severity.ERROR
    assert "keys.k" in finding.fact and A_KEY not in finding.line
    assert "remove one" in finding.way_out


def test_a_value_from_the_environment_is_pointed_out():
    finding = the_one(found(overrides=(("POOLGATE_GATEWAY__PORT", "gateway.port"),)), "gateway.port")
    assert finding.severity is Severity.HINT
    assert "POOLGATE_GATEWAY__PORT" in finding.fact
    assert "unset it" in finding.way_out


def test_errors_come_first():
    facts = facts_of({"a": {}}, overrides=(("POOLGATE_GATEWAY__PORT", "gateway.port"),), redis=Trouble("away", "start"))
    assert [finding.severity for finding in findings(facts)] == [Severity.ERROR, Severity.HINT, Severity.HINT]
