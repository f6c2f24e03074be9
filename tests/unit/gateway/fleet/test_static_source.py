"""Replicas that config.toml alone names."""

from __future__ import annotations

import pytest
from fakes.story import a_config

from gateway.fleet.sources.static import StaticSource


async def test_each_url_is_a_ready_replica_with_the_pools_facts() -> None:
    pools = {
        "far": {
            "urls": ["http://10.0.0.7:8000/", "http://10.0.0.8:8000"],
            "served_name": "qwen",
            "max_model_len": 8192,
            "scheduling_policy": "priority",
        },
        "plain": {"urls": ["http://10.0.0.9"]},
        "own": {"model": "/models/x"},
    }
    config = a_config(pools=pools, routes={"chat": {"targets": [{"pool": "far"}]}}).config
    far0, far1, plain = await StaticSource(config, 5.0).replicas()
    assert (far0.id, far0.url, far0.served_name) == ("far/0@static", "http://10.0.0.7:8000", "qwen")
    assert (far0.max_model_len, far0.has_priority, far0.since_s, far0.is_ready()) == (8192, True, 5.0, True)
    assert (far1.id, far1.pool) == ("far/1@static", "far")
    assert (plain.served_name, plain.max_model_len, plain.has_priority) == ("plain", None, False)


async def test_a_cloud_has_its_key_its_kind_and_no_doubled_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUD_KEY", " sk-cloud\n")
    pools = {
        "cloud": {"urls": ["https://llm.example.com/v1"], "engine": "openai", "key_env": "CLOUD_KEY"},
        "near": {"urls": ["unix:/run/vllm.sock"]},
    }
    config = a_config(pools=pools, routes={"chat": {"targets": [{"pool": "near"}]}}).config
    cloud, near = await StaticSource(config, 5.0).replicas()
    assert (cloud.url, cloud.engine, cloud.api_key) == ("https://llm.example.com", "openai", "sk-cloud")
    assert (near.url, near.engine, near.api_key) == ("unix:/run/vllm.sock", "vllm", None)
