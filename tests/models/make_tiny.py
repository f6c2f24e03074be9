"""Writes tiny models with random weights, so that real `vllm serve` starts fast. Called by `deploy/demo/steps.py`.

    python make_tiny.py .poolgate/models/SmolLM2-135M-Instruct TARGET

    TARGET/tiny-random        Llama, 2 layers, hidden 64: answers with random words (also --convert embed)
    TARGET/tiny-random-lora   a LoRA adapter for it, in PEFT's format
    TARGET/tiny-embed         BERT with mean pooling: /v1/embeddings
    TARGET/tiny-rerank        BERT cross-encoder with one label: /v1/score, /v1/rerank

The tokenizer is the first argument's. Runs in vLLM's environment (torch, safetensors, tokenizers); no network. Seeds
are fixed: the same files every time.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCAB = 64, 2, 2, 1, 128, 49152
LLAMA_CONTEXT, BERT_CONTEXT = 4096, 512
HEAD = HIDDEN // HEADS  # 32: the smallest head that vLLM's CPU attention takes
START, END = 1, 2  # <|im_start|>, <|im_end|>

Weights = dict[str, torch.Tensor]


class Draw:
    """A stream of random bf16 tensors; one seed per model."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._generator) * std).to(torch.bfloat16)


def ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_weights(target: Path, weights: Weights, name: str = "model.safetensors") -> None:
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / name, metadata={"format": "pt"})


def write_tokenizer(source: Path, target: Path, *, takes_pairs: bool, max_length: int) -> None:
    """A copy of `source`'s; `takes_pairs` adds what a cross-encoder needs: token types and separators."""
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["model_max_length"] = max_length
    if takes_pairs:
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|>:0 $A:0 <|im_end|>:0",
            pair="<|im_start|>:0 $A:0 <|im_end|>:0 $B:1 <|im_end|>:1",
            special_tokens=[("<|im_start|>", START), ("<|im_end|>", END)],
        )
        tokenizer.save(str(target / "tokenizer.json"))
        config.pop("chat_template", None)
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        config["sep_token"] = "<|im_end|>"
        config["cls_token"] = "<|im_start|>"
    else:
        shutil.copy(source / "tokenizer.json", target / "tokenizer.json")
    write_json(target / "tokenizer_config.json", config)


def tiny_llama(tokenizer: Path, target: Path) -> None:
    draw, std = Draw(0), 0.3  # a large std lets greedy decoding walk through varied tokens instead of repeating one
    write_tokenizer(tokenizer, target, takes_pairs=False, max_length=LLAMA_CONTEXT)
    weights = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN, std=std), "model.norm.weight": ones(HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        weights[layer + "self_attn.q_proj.weight"] = draw(HEADS * HEAD, HIDDEN, std=std)
        weights[layer + "self_attn.k_proj.weight"] = draw(KV_HEADS * HEAD, HIDDEN, std=std)
        weights[layer + "self_attn.v_proj.weight"] = draw(KV_HEADS * HEAD, HIDDEN, std=std)
        weights[layer + "self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD, std=std)
        weights[layer + "mlp.gate_proj.weight"] = draw(FFN, HIDDEN, std=std)
        weights[layer + "mlp.up_proj.weight"] = draw(FFN, HIDDEN, std=std)
        weights[layer + "mlp.down_proj.weight"] = draw(HIDDEN, FFN, std=std)
        weights[layer + "input_layernorm.weight"] = ones(HIDDEN)
        weights[layer + "post_attention_layernorm.weight"] = ones(HIDDEN)
    weights["lm_head.weight"] = draw(VOCAB, HIDDEN, std=std)
    write_weights(target, weights)
    special = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": END}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **special,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "max_position_embeddings": LLAMA_CONTEXT,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
    }
    write_json(target / "config.json", config)
    write_json(target / "generation_config.json", special)


def tiny_lora(target: Path, rank: int = 8) -> None:
    draw = Draw(1)
    shapes = {"q_proj": (HEADS * HEAD, HIDDEN), "v_proj": (KV_HEADS * HEAD, HIDDEN)}
    weights = {}
    for i in range(LAYERS):
        for name, (rows, columns) in shapes.items():
            layer = f"base_model.model.model.layers.{i}.self_attn.{name}."
            weights[layer + "lora_A.weight"] = draw(rank, columns, std=0.3)
            weights[layer + "lora_B.weight"] = draw(rows, rank, std=0.3)
    write_weights(target, weights, "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-random",
        "r": rank,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(shapes),
        "inference_mode": True,
    }
    write_json(target / "adapter_config.json", config)


def bert_config(architecture: str, **more: object) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "bert",
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": BERT_CONTEXT,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "pad_token_id": END,
        "type_vocab_size": 2,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        **more,
    }


def bert_weights(draw: Draw, prefix: str) -> Weights:
    weights: Weights = {}

    def linear(name: str, rows: int, columns: int) -> None:
        weights[f"{prefix}{name}.weight"] = draw(rows, columns, std=0.2)
        weights[f"{prefix}{name}.bias"] = zeros(rows)

    def norm(name: str) -> None:
        weights[f"{prefix}{name}.weight"] = ones(HIDDEN)
        weights[f"{prefix}{name}.bias"] = zeros(HIDDEN)

    weights[f"{prefix}embeddings.word_embeddings.weight"] = draw(VOCAB, HIDDEN, std=0.5)
    weights[f"{prefix}embeddings.position_embeddings.weight"] = draw(BERT_CONTEXT, HIDDEN, std=0.05)
    weights[f"{prefix}embeddings.token_type_embeddings.weight"] = draw(2, HIDDEN, std=0.05)
    norm("embeddings.LayerNorm")
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}."
        for part in ("query", "key", "value"):
            linear(f"{layer}attention.self.{part}", HIDDEN, HIDDEN)
        linear(layer + "attention.output.dense", HIDDEN, HIDDEN)
        norm(layer + "attention.output.LayerNorm")
        linear(layer + "intermediate.dense", FFN, HIDDEN)
        linear(layer + "output.dense", HIDDEN, FFN)
        norm(layer + "output.LayerNorm")
    return weights


def tiny_embed(tokenizer: Path, target: Path) -> None:
    """With the files of sentence-transformers that tell vLLM how to pool."""
    write_tokenizer(tokenizer, target, takes_pairs=True, max_length=BERT_CONTEXT)
    write_weights(target, bert_weights(Draw(2), ""))
    write_json(target / "config.json", bert_config("BertModel"))
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds.items())
    ]
    write_json(target / "modules.json", modules)
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    write_json(target / "1_Pooling" / "config.json", pooling)
    write_json(target / "sentence_bert_config.json", {"max_seq_length": BERT_CONTEXT, "do_lower_case": False})


def tiny_rerank(tokenizer: Path, target: Path) -> None:
    draw = Draw(3)
    write_tokenizer(tokenizer, target, takes_pairs=True, max_length=BERT_CONTEXT)
    weights = bert_weights(draw, "bert.")
    weights["bert.pooler.dense.weight"] = draw(HIDDEN, HIDDEN, std=0.2)
    weights["bert.pooler.dense.bias"] = zeros(HIDDEN)
    weights["classifier.weight"] = draw(1, HIDDEN, std=0.5)
    weights["classifier.bias"] = zeros(1)
    write_weights(target, weights)
    labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    write_json(target / "config.json", bert_config("BertForSequenceClassification", **labels))


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    tokenizer, target = Path(sys.argv[1]), Path(sys.argv[2])
    tiny_llama(tokenizer, target / "tiny-random")
    tiny_lora(target / "tiny-random-lora")
    tiny_embed(tokenizer, target / "tiny-embed")
    tiny_rerank(tokenizer, target / "tiny-rerank")


if __name__ == "__main__":
    main()
