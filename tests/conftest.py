"""Fixtures of the whole test tree: where the real vLLM and its models are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["plugins.real_engines"]

_ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def vllm_command() -> str:
    """Path of the vllm executable: POOLGATE_TEST_VLLM, else the one that `make` installs."""
    command = Path(os.environ.get("POOLGATE_TEST_VLLM", _ROOT / ".venv-vllm/bin/vllm"))
    if not command.exists():
        pytest.fail(f"{command} does not exist: install vLLM there or set POOLGATE_TEST_VLLM")
    return str(command)


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """Folder with tiny-random, tiny-embed, tiny-rerank and SmolLM2-135M-Instruct: POOLGATE_TEST_MODELS."""
    folder = Path(os.environ.get("POOLGATE_TEST_MODELS", _ROOT / ".poolgate/models"))
    if not (folder / "tiny-random").is_dir():
        pytest.fail(f"{folder} has no tiny-random: make the models there or set POOLGATE_TEST_MODELS")
    return folder
