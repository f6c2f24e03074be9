"""The key of a first run: made once per store when nobody has a key yet, and written where its owner finds it.

Called at start by every gateway process and by `poolgate up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from pathlib import Path

from gateway.admission.key_record import new_key
from gateway.admission.key_ring import KeyRing
from gateway.admission.link import PATIENT_S, RedisLink
from gateway.config.load import LoadedConfig
from gateway.domain.store_keys import TAG

log = logging.getLogger(__name__)

MARKER = f"{TAG}:first_key"  # "done", or for at most CLAIM_S whoever is making it
DONE = b"done"
CLAIM_S = 10
WAIT_S = 15.0
POLL_S = 0.05


def first_key_file(state_dir: Path) -> Path:
    return state_dir / "first.key"


async def ensure_first_key(loaded: LoadedConfig, link: RedisLink) -> Path | None:
    """The file that holds the first key in clear (mode 0600), or None if there is none here.

    There is none when the config has [keys.*], when the store had a key before, or when the file was removed.
    Of several processes exactly one makes the key; the others wait for it. Raises StoreUnavailable, OSError.
    """
    if loaded.config.keys:
        return None
    path = first_key_file(loaded.state_dir)
    ring = KeyRing(loaded.config, link)
    me = secrets.token_hex(8)
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if await link.call(lambda redis: redis.set(MARKER, me, nx=True, ex=CLAIM_S), timeout_s=PATIENT_S):
            await _make(ring, path)
            await link.call(lambda redis: redis.set(MARKER, DONE), timeout_s=PATIENT_S)
            break
        if await link.call(lambda redis: redis.get(MARKER), timeout_s=PATIENT_S) == DONE:
            break
        await asyncio.sleep(POLL_S)
    return path if path.exists() else None


async def _make(ring: KeyRing, path: Path) -> None:
    if await ring.all_keys():
        return
    clear = new_key(secrets.token_hex(4))
    # the file first: a crash in between leaves a file with a key that is not valid, which the next start replaces
    await asyncio.to_thread(write_private, path, clear + "\n")
    await ring.create("first", clear=clear)
    log.info("made a first key; it is in %s", path)


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, readable by its owner only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
