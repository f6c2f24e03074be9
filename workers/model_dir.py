"""Reads what one model directory holds, without its weights. Called by gather.py; judged by model_rules.py."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.facts import ModelDir

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
LFS_BEGIN = b"version https://git-lfs"
MAX_JSON_BYTES = 64 << 20  # an index of a large model has some MB


def read_model_dir(path: Path) -> ModelDir:
    """Never raises for what the disk holds; a directory that cannot be listed is "unreadable"."""
    if path.is_file():
        return ModelDir("file")
    try:
        entries = list(os.scandir(path))
        sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        folders = {entry.name for entry in entries if entry.is_dir()}
    except FileNotFoundError:
        return ModelDir("missing")
    except OSError as exc:
        return ModelDir("unreadable", faults=(exc.strerror or str(exc),))
    faults: list[str] = []
    weights = [name for name in sizes if name.endswith(WEIGHT_SUFFIXES)]
    tokenizer = _json(path / "tokenizer_config.json", faults)
    return ModelDir(
        "directory",
        names=frozenset(sizes),
        config=_json(path / "config.json", faults),
        missing_shards=_missing_shards(path, sizes, faults),
        lfs_pointers=tuple(sorted(name for name in weights if sizes[name] < 1024 and _is_pointer(path / name))),
        weights_bytes=sum(sizes[name] for name in weights),
        has_chat_template=bool(tokenizer.get("chat_template"))
        or "chat_templates" in folders
        or any(name in sizes for name in TEMPLATE_FILES),
        faults=tuple(faults),
    )


def _json(path: Path, faults: list[str]) -> Mapping[str, Any]:
    """The object in a file; empty when there is no such file, or when it is no object (then with a fault)."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            faults.append(f"{path.name} is larger than {MAX_JSON_BYTES >> 20} MiB")
            return {}
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as exc:
        faults.append(f"{path.name} cannot be read ({exc.strerror})")
        return {}
    except (ValueError, RecursionError):
        faults.append(f"{path.name} is not JSON")
        return {}
    if not isinstance(document, dict):
        faults.append(f"{path.name} is not a JSON object")
        return {}
    return document


def _missing_shards(path: Path, sizes: Mapping[str, int], faults: list[str]) -> tuple[str, ...]:
    for index in INDEX_FILES:
        if index in sizes:
            files = _json(path / index, faults).get("weight_map", {})
            listed = set(files.values()) if isinstance(files, dict) else set()
            return tuple(sorted(name for name in listed if isinstance(name, str) and not (path / name).is_file()))
    return ()


def _is_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_BEGIN)) == LFS_BEGIN
    except OSError:
        return False
