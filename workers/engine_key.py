"""The key that each engine asks its callers for: one per worker, the same at every start. Called by `life.py`.

It must not change between starts: vLLM 0.26 (0.32 no longer) counts VLLM_API_KEY among what its compiled code depends
on, so a fresh key would make each restart compile the model again and keep one more copy of the result.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import secrets
from pathlib import Path

SECRET_BYTES = 32


def engine_key(state_dir: Path, worker_id: str) -> str:
    """43 characters that nobody can guess who cannot read the state directory. Raises OSError."""
    digest = hmac.digest(_secret(state_dir / "workers" / "engine.secret"), worker_id.encode(), "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _secret(path: Path) -> bytes:
    """Made when it is missing or not whole. Its directory belongs to one supervisor: nobody else writes it."""
    with contextlib.suppress(FileNotFoundError):
        found = path.read_bytes()
        if len(found) == SECRET_BYTES:
            return found
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = secrets.token_bytes(SECRET_BYTES)
    draft = path.with_suffix(".new")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(made)
    os.replace(draft, path)
    return made
