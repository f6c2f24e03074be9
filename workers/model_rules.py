"""What `vllm serve` would stumble over in a pool's model, from the facts alone. Pure; called by preflight.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.config.schema import PoolSection
from workers.facts import Facts, ModelDir
from workers.finding import Finding, Part, Severity
from workers.model_dir import WEIGHT_SUFFIXES
from workers.spec import WorkerSpec

HUB_NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?")  # huggingface_hub's rule
GGUF_WAY_OUT = (
    "Poolgate starts models as Hugging Face directories (config.json, tokenizer.json, *.safetensors): give the "
    "original model, or convert the file"
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
TOKENIZER_SUFFIXES = (".tiktoken", ".spm")
GENERATIVE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
# where vLLM looks for a model's window, in transformers' words; the smallest one counts
WINDOW_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# kinds of rope scaling whose factor the positions hold already
SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def model_findings(facts: Facts) -> Iterator[Finding]:
    """One look per pool: its workers share model and options."""
    seen: set[str] = set()
    for spec in facts.specs:
        if spec.pool in seen:
            continue
        seen.add(spec.pool)
        pool = facts.config.pools[spec.pool]
        key = f"pools.{spec.pool}.model"
        if spec.model_is_local:
            yield from _path(key, spec, pool, facts)
        else:
            yield from _name(key, spec.model, facts)


def _error(key: str, fact: str, way_out: str) -> Finding:
    return Finding(Severity.ERROR, Part.WORKERS, key, fact, way_out)


def _warning(key: str, fact: str, way_out: str) -> Finding:
    return Finding(Severity.WARNING, Part.WORKERS, key, fact, way_out)


def _name(key: str, name: str, facts: Facts) -> Iterator[Finding]:
    if "gguf" in name.lower() and (":" in name or name.lower().endswith(".gguf")):
        yield _error(key, f'"{name}" is a GGUF file of a hub', GGUF_WAY_OUT)
    elif HUB_NAME.fullmatch(name) is None:
        yield _error(
            key,
            f'"{name}" is no directory ({facts.directory / name} is missing) and no hub name',
            "give the model's directory, or a name such as Qwen/Qwen2.5-0.5B-Instruct",
        )
    elif name in facts.cached_hub_names:
        return
    elif name in facts.offline_hub_names:
        yield _warning(
            key,
            f'"{name}" is a hub name, but HF_HUB_OFFLINE is set and the hub\'s cache here does not have it',
            "unset HF_HUB_OFFLINE, or give the model's directory",
        )
    else:
        yield Finding(
            Severity.HINT,
            Part.WORKERS,
            key,
            f'"{name}" is taken as a hub name: {facts.directory / name} is no directory, or written without a slash',
            "vLLM downloads it at the first start; a directory beside the config is written ./NAME",
        )


def _path(key: str, spec: WorkerSpec, pool: PoolSection, facts: Facts) -> Iterator[Finding]:
    path = spec.model
    model = facts.models[path]
    if model.kind == "missing":
        yield _error(
            key, f"{path} does not exist", "correct the path (relative ones start at the config file) or put it there"
        )
    elif path.lower().endswith(".gguf"):
        yield _error(key, f"{path} is a GGUF file", GGUF_WAY_OUT)
    elif model.kind == "file":
        yield _error(key, f"{path} is a file", "give the directory that holds config.json and the weights")
    elif model.kind == "unreadable":
        yield _error(key, f"{path} cannot be read ({', '.join(model.faults)})", "give this user access to it")
    else:
        options = {name.replace("-", "_").lstrip("_"): value for name, value in pool.vllm_args.items()}
        yield from _files(key, path, model, options)
        yield from _settings(spec.pool, pool, model, options, facts)


def _files(key: str, path: str, model: ModelDir, options: Mapping[str, Any]) -> Iterator[Finding]:
    again = "copy or download the model again"
    for fault in model.faults:
        yield _error(key, f"{path}: {fault}", again)
    if not {"config.json", "params.json"} & model.names and "hf_config_path" not in options:
        yield _error(key, f"{path} has no config.json", "give the directory of a Hugging Face model")
    if options.get("load_format") != "dummy":
        has_weights = any(name.endswith(WEIGHT_SUFFIXES) for name in model.names)
        if not has_weights and any(name.lower().endswith(".gguf") for name in model.names):
            yield _error(key, f"{path} holds only GGUF weights", GGUF_WAY_OUT)
        elif not has_weights and not model.missing_shards:
            yield _error(key, f"{path} holds no weights (*.safetensors, *.bin)", again)
        if model.missing_shards:
            yield _error(key, f"{path} misses {_some(model.missing_shards)} of its weights", again)
        if model.lfs_pointers:
            yield _error(
                key,
                f"{path}: {_some(model.lfs_pointers)} are Git LFS pointers, not weights",
                "run `git lfs pull` there",
            )
    has_tokenizer = any(name in TOKENIZER_FILES or name.endswith(TOKENIZER_SUFFIXES) for name in model.names)
    if not has_tokenizer and not {"tokenizer", "skip_tokenizer_init"} & options.keys():
        yield _error(
            key, f"{path} has no tokenizer (tokenizer.json, tokenizer.model …)", "add it from the original model"
        )
    if _is_generative(model) and not model.has_chat_template and "chat_template" not in options:
        yield _warning(
            key,
            f"{path} has no chat template: /v1/chat/completions will be refused by vLLM",
            'add chat_template.jinja to it, or set vllm_args = { chat_template = "FILE" }',
        )


def _settings(
    name: str, pool: PoolSection, model: ModelDir, options: Mapping[str, Any], facts: Facts
) -> Iterator[Finding]:
    if "hf_overrides" in options:
        return  # it may change any of what is compared here
    config = {**model.config, **_object(model.config.get("text_config"))}
    heads = config.get("num_attention_heads")
    size = pool.tensor_parallel_size
    if isinstance(heads, int) and heads > 0 and heads % size:
        fitting = ", ".join(str(n) for n in range(1, min(heads, 64) + 1) if heads % n == 0)
        yield _error(
            f"pools.{name}.tensor_parallel_size",
            f"{size} does not divide the model's {heads} attention heads",
            f"use one of {fitting}",
        )
    window = model_window(config)
    if pool.max_model_len and window and pool.max_model_len > window and not facts.allows_long_window:
        yield _warning(
            f"pools.{name}.max_model_len",
            f"{pool.max_model_len} is over the {window} positions that the model was made for; vLLM refuses that",
            f"set it to {window} or less",
        )
    wanted = (pool.quantization or "").removesuffix("_marlin")
    made = _object(config.get("quantization_config")).get("quant_method")
    if wanted in ("awq", "gptq") and "quantize_config.json" not in model.names and made != wanted:
        said = f"it is {made}" if made else "nothing of quantization"
        yield _warning(
            f"pools.{name}.quantization",
            f'"{pool.quantization}" is set, but the model says {said}',
            "remove the key (vLLM reads it from the model), or give the quantized model",
        )


def model_window(config: Mapping[str, Any]) -> int | None:
    """Positions of the model's window as vLLM derives it from config.json; None when it says nothing.

    Source: vLLM 0.32, `_get_and_verify_max_len`: the smallest of the known keys, times the factor of the rope scaling.
    """
    own = config.get("model_max_length")
    known = [own] if own else [config.get(key) for key in WINDOW_KEYS]
    positions = [n for n in known if isinstance(n, int) and n > 0]
    if not positions:
        return None
    scaling = _object(config.get("rope_scaling")) or _object(config.get("rope_parameters"))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor = scaling.get("factor", 1.0)
    is_scaled = kind in SCALED_ALREADY or "gemma3" in str(config.get("model_type"))
    return min(positions) if is_scaled or not isinstance(factor, (int, float)) else int(min(positions) * factor)


def _is_generative(model: ModelDir) -> bool:
    made_for = model.config.get("architectures")
    names = made_for if isinstance(made_for, list) else []
    return "modules.json" not in model.names and any(str(name).endswith(GENERATIVE) for name in names)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _some(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more files' if len(names) > 3 else ''}"
