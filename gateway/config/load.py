"""Read config.toml, check it, and give it a revision. Called by every command; a fault raises ConfigError."""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from gateway.config import rules
from gateway.config.schema import Config
from gateway.domain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A sound config, where it came from, and its revision (12 hex digits over its whole content)."""

    config: Config
    path: Path
    revision: str

    @property
    def directory(self) -> Path:
        return self.path.parent

    @property
    def state_dir(self) -> Path:
        return self.directory / Path(self.config.gateway.state_dir).expanduser()

    def resolve(self, text: str) -> str:
        """A command or path of the config: with a slash in it, relative to the config file; else as it is."""
        return str(self.directory / Path(text).expanduser()) if "/" in text else text


def load(path: Path) -> LoadedConfig:
    """Raises ConfigError with every fault found, each with its key path."""
    path = path.resolve()
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise ConfigError([f"{path}: cannot be read ({exc.strerror}); give another file with --config"]) from exc
    try:
        data = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError([f"{path}: is not TOML: {exc}"]) from exc
    return parse(data, path)


def parse(data: dict[str, Any], path: Path) -> LoadedConfig:
    """`data` is the decoded TOML document; environment variables override it."""
    try:
        config = _settings_type(data)()
    except ValidationError as exc:
        raise ConfigError([_line(e["loc"], e["type"], e["msg"], e.get("ctx") or {}) for e in exc.errors()]) from exc
    faults = rules.findings(config)
    if faults:
        raise ConfigError(faults)
    return LoadedConfig(config, path, revision_of(config))


def revision_of(config: Config) -> str:
    content = config.model_dump(mode="json", by_alias=True)
    content["redis"]["url"] = config.redis.url.get_secret_value()
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _settings_type(data: dict[str, Any]) -> type[Config]:
    """Config with its sources in our order: environment first, then the file."""

    class FromFile(Config):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (env_settings, _Document(settings_cls, data))

    return FromFile


class _Document(PydanticBaseSettingsSource):
    def __init__(self, settings_cls: type[BaseSettings], data: dict[str, Any]) -> None:
        super().__init__(settings_cls)
        self._data = data

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return self._data.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._data


def _line(loc: Sequence[int | str], kind: str, message: str, context: dict[str, Any]) -> str:
    """A pydantic error as `key.path: what is wrong; the way out`, without the value (it may be a secret)."""
    path = key_path(loc)
    if kind == "extra_forbidden":
        return f"{path}: unknown key; remove it or check its spelling (docs/config.md lists all keys)"
    if kind == "missing":
        return f"{path}: is missing; add it"
    if kind == "too_short" and loc in (("pools",), ("routes",)):
        return f"{path}: is empty; define at least one [{path}.NAME]"
    if kind == "string_pattern_mismatch":
        return f"{path}: does not have the right form; it must match {context.get('pattern')}"
    return f"{path}: {message.removeprefix('Value error, ')}"


def key_path(loc: Sequence[int | str]) -> str:
    """('pools', 'a', 'replicas', 0, 'gpus') → 'pools.a.replicas[0].gpus'."""
    out = ""
    for part in loc:
        if isinstance(part, int):
            out += f"[{part}]"
        elif part == "[key]":
            out += " (its name)"
        elif part in ("str", "int", "float", "bool", "constrained-str"):
            continue  # a branch of a union, not a key
        else:
            out += f".{part}" if out else str(part)
    return out or "(top level)"


def read_key_env(name: str) -> str | None:
    """The key in environment variable `name`, without the blanks that come along from files; None when unset."""
    value = os.environ.get(name, "").strip()
    return value or None
