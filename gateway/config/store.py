"""How every process reaches Redis: the client that the config asks for, with its deadlines."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import redis.asyncio as redis_asyncio

from gateway.config.load import LoadedConfig
from gateway.config.redis_client import client_for

MAX_SOCKET_PATH = 100  # Linux allows 107 bytes in sun_path


def embedded_socket(state_dir: Path) -> Path:
    """Where the embedded Redis listens: in the state directory, or under the user's temp folder if that is too long."""
    path = state_dir.resolve() / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"poolgate-{os.getuid()}-{digest}" / "redis.sock"


def store_url(loaded: LoadedConfig) -> str:
    redis = loaded.config.redis
    return f"unix://{embedded_socket(loaded.state_dir)}" if redis.is_embedded else redis.url.get_secret_value()


def connect(loaded: LoadedConfig, *, timeout_s: float | None = None) -> redis_asyncio.Redis:
    """A client that has not connected yet; the caller closes it with `aclose()`.

    Every call ends within `timeout_s` (default: `redis.timeout_s`), with redis.TimeoutError or redis.ConnectionError.
    """
    return client_for(store_url(loaded), loaded.config.redis.timeout_s if timeout_s is None else timeout_s)
