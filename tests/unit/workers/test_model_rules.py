from __future__ import annotations

import dataclasses

import pytest
from fakes.preflight_facts import MODEL, WHOLE, facts_of, the_one

from workers.facts import ModelDir
from workers.finding import Severity
from workers.model_rules import model_findings, model_window


def found(pool=None, *, model=WHOLE, **known):
    return list(model_findings(facts_of({"a": pool or {}}, models={MODEL: model}, **known)))


def without(*names, **changes):
    return dataclasses.replace(WHOLE, names=WHOLE.names - set(names), **changes)


def test_a_whole_model_gets_no_finding():
    assert found() == []


def test_pools_are_looked_at_once_however_many_replicas_they_have():
    assert len(found({"replicas": [{}, {}]}, model=ModelDir("missing"))) == 1


@pytest.mark.parametrize(
    ("model", "fact", "way_out"),
    [
        (ModelDir("missing"), "/models/m does not exist", "correct the path"),
        (ModelDir("file"), "/models/m is a file", "give the directory"),
        (ModelDir("unreadable", faults=("Permission denied",)), "Permission denied", "access"),
        (without("config.json"), "has no config.json", "Hugging Face"),
        (without("tokenizer.json"), "has no tokenizer", "original model"),
        (without("model.safetensors"), "holds no weights", "again"),
        (without(missing_shards=("b.safetensors",)), "misses b.safetensors of its weights", "again"),
        (without(missing_shards=tuple("abcde")), "misses a, b, c and 2 more files", "again"),
        (without(lfs_pointers=("model.safetensors",)), "Git LFS pointers", "git lfs pull"),
        (without(faults=("config.json is not JSON",)), "config.json is not JSON", "again"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_directory_that_vllm_could_not_load(model, fact, way_out):
    finding = the_one(found(model=model), "pools.a.model")
    assert finding.severity is Severity.ERROR
    assert fact in finding.fact
    assert way_out in finding.way_out


def test_a_gguf_file_is_refused_with_what_to_give_instead():
    path = "/models/m.Q4_K_M.gguf"
    facts = facts_of({"a": {"model": path}}, models={path: ModelDir("file")})
    finding = the_one(list(model_findings(facts)), "pools.a.model")
    assert finding.severity is Severity.ERROR
    assert finding.fact == f"{path} is a GGUF file"
    assert "Hugging Face director" in finding.way_out


def test_a_directory_that_holds_only_gguf_is_refused():
    model = without("model.safetensors")
    model = dataclasses.replace(model, names=model.names | {"m-q4.gguf"})
    finding = the_one(found(model=model), "pools.a.model")
    assert "only GGUF" in finding.fact
    assert "convert" in finding.way_out


@pytest.mark.parametrize("name", ["unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "org/model.gguf"])
def test_a_gguf_of_a_hub_is_refused(name):
    finding = the_one(list(model_findings(facts_of({"a": {"model": name}}))), "pools.a.model")
    assert finding.severity is Severity.ERROR
    assert "GGUF" in finding.fact


@pytest.mark.parametrize("text", [".poolgate/models/m", "models/org/name", "a--b/c", "a/../b"])
def test_what_is_neither_a_directory_nor_a_hub_name(text):
    finding = the_one(list(model_findings(facts_of({"a": {"model": text}}))), "pools.a.model")
    assert finding.severity is Severity.ERROR
    assert f"/etc/poolgate/{text}" in finding.fact
    assert "Qwen/Qwen2.5-0.5B-Instruct" in finding.way_out


def test_a_hub_name_is_a_hint_a_warning_when_offline_and_nothing_when_cached():
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    pools = {"a": {"model": name}}
    hint = the_one(list(model_findings(facts_of(pools))), "pools.a.model")
    assert hint.severity is Severity.HINT
    assert "./NAME" in hint.way_out
    offline = {"offline_hub_names": frozenset({name})}
    warning = the_one(list(model_findings(facts_of(pools, **offline))), "pools.a.model")
    assert warning.severity is Severity.WARNING
    assert "unset HF_HUB_OFFLINE" in warning.way_out
    assert list(model_findings(facts_of(pools, **offline, cached_hub_names=frozenset({name})))) == []


def test_a_chat_model_without_a_template_is_a_warning():
    finding = the_one(found(model=without(has_chat_template=False)), "pools.a.model")
    assert finding.severity is Severity.WARNING
    assert "chat_template" in finding.way_out
    assert found({"vllm_args": {"chat-template": "x.jinja"}}, model=without(has_chat_template=False)) == []


def test_an_embedding_model_needs_no_template():
    bert = without(has_chat_template=False, config={"architectures": ["BertModel"]})
    assert found(model=bert) == []
    sentences = dataclasses.replace(WHOLE, names=WHOLE.names | {"modules.json"}, has_chat_template=False)
    assert found(model=sentences) == []


def test_weights_are_not_asked_for_where_none_are_loaded():
    assert found({"vllm_args": {"load_format": "dummy"}}, model=without("model.safetensors")) == []


def test_a_tokenizer_from_elsewhere_is_enough():
    assert found({"vllm_args": {"tokenizer": "/other"}}, model=without("tokenizer.json")) == []


def test_a_window_larger_than_the_models_is_a_warning():
    finding = the_one(found({"max_model_len": 9000}), "pools.a.max_model_len")
    assert finding.severity is Severity.WARNING
    assert "9000" in finding.fact and "8192" in finding.fact
    assert finding.way_out == "set it to 8192 or less"
    assert found({"max_model_len": 8192}) == []
    assert found({"max_model_len": 9000}, allows_long_window=True) == []


def test_tensor_parallel_size_has_to_divide_the_heads():
    finding = the_one(found({"tensor_parallel_size": 3}), "pools.a.tensor_parallel_size")
    assert finding.severity is Severity.ERROR
    assert finding.fact == "3 does not divide the model's 32 attention heads"
    assert finding.way_out == "use one of 1, 2, 4, 8, 16, 32"
    assert found({"tensor_parallel_size": 4}) == []


def test_heads_of_a_multimodal_model_are_found_in_its_text_part():
    model = without(config={"text_config": {"num_attention_heads": 6}})
    assert the_one(found({"tensor_parallel_size": 4}, model=model), "pools.a.tensor_parallel_size")


def test_overrides_of_the_models_config_are_not_judged():
    assert found({"tensor_parallel_size": 3, "vllm_args": {"hf_overrides": {"num_attention_heads": 3}}}) == []


def test_quantization_that_the_model_does_not_have():
    finding = the_one(found({"quantization": "awq"}), "pools.a.quantization")
    assert finding.severity is Severity.WARNING
    assert "remove the key" in finding.way_out
    awq = without(config={**WHOLE.config, "quantization_config": {"quant_method": "awq"}})
    assert found({"quantization": "awq_marlin"}, model=awq) == []
    assert "it is awq" in the_one(found({"quantization": "gptq"}, model=awq), "pools.a.quantization").fact
    assert found({"quantization": "fp8"}) == []


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048),
        ({"max_position_embeddings": 4096, "model_max_length": 131072}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_parameters": {"type": "dynamic", "factor": 2}}, 8192),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": None}}, 4096),
        (
            {"model_type": "gemma3", "max_position_embeddings": 9, "rope_scaling": {"type": "linear", "factor": 8}},
            9,
        ),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_the_window_is_derived_as_vllm_does(config, window):
    assert model_window(config) == window
