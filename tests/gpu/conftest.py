"""What the GPU tests run on: the card, the vllm command, a small model with its weights and a large one without."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from workers.gpu import Card, list_cards

_ROOT = Path(__file__).parent.parent.parent
_SMALL = "SmolLM2-135M-Instruct"
# Qwen2.5-7B but for the vocabulary, which is that of the tokenizer beside it: 14 GiB in bfloat16.
_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_KEPT = ("bos_token_id", "eos_token_id", "vocab_size", "hidden_act", "torch_dtype")


@pytest.fixture(scope="session")
def idle_card() -> Card:
    """GPU 0 as it is before a test has started anything on it."""
    cards = asyncio.run(list_cards())
    if not cards:
        pytest.fail("nvidia-smi lists no GPU here; on such a machine run pytest with -m 'not gpu'")
    return cards[0]


@pytest.fixture(scope="session")
def gpu_vllm() -> str:
    """Path of a vllm command built for the GPU: POOLGATE_TEST_VLLM, else the one that `make serve` installs."""
    command = Path(os.environ.get("POOLGATE_TEST_VLLM", _ROOT / ".venv-vllm/bin/vllm"))
    if not command.exists():
        pytest.fail(f"{command} does not exist: run `make serve` once, or set POOLGATE_TEST_VLLM")
    return str(command)


@pytest.fixture(scope="session")
def small_model() -> Path:
    """SmolLM2 with its weights, so that answers make sense."""
    folder = Path(os.environ.get("POOLGATE_TEST_MODELS", _ROOT / ".poolgate/models")) / _SMALL
    if not folder.is_dir():
        pytest.fail(f"{folder} does not exist: run `make serve` once, or set POOLGATE_TEST_MODELS")
    return folder


@pytest.fixture(scope="session")
def large_model(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of a 7B with the small one's tokenizer, for `--load-format dummy`: answers are random words."""
    folder = tmp_path_factory.mktemp("models") / "7b-shape"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(small_model / name, folder)
    small = json.loads((small_model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: small[key] for key in _KEPT} | _7B))
    return folder
