"""Read config.toml, check it, and give it a revision. Called by every command; a fault raises ConfigError."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource
from pydantic_settings.exceptions import SettingsError

from gateway.config import rules
from gateway.config.faults import lines_of
from gateway.config.redis_url import read_redis_url
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
        raise ConfigError([f"{path}: is not TOML: {exc}; correct it there"]) from exc
    return parse(data, path)


def parse(data: dict[str, Any], path: Path) -> LoadedConfig:
    """`data` is the decoded TOML document; environment variables override it."""
    try:
        config = _settings_type(data)()
    except ValidationError as exc:
        raise ConfigError(lines_of(exc)) from exc
    except SettingsError as exc:
        raise ConfigError([_environment_line(exc)]) from exc
    faults = rules.findings(config)
    if faults:
        raise ConfigError(faults)
    return LoadedConfig(config, path, revision_of(config))


def revision_of(config: Config) -> str:
    content = config.model_dump(mode="json", by_alias=True)
    # without its passwords: a revision is shown, and a weak password could be guessed from it
    url = config.redis.url.get_secret_value()
    content["redis"]["url"] = url if config.redis.is_embedded else read_redis_url(url).public
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


def _environment_line(error: SettingsError) -> str:
    """A variable that stands for a list or a table and is not JSON. pydantic tells the section, not the variable."""
    found = re.search(r'field "(\w+)"', str(error))
    section = found[1] if found else "(top level)"
    return (
        f"{section}: an environment variable POOLGATE_{section.upper()}… is not JSON, but its key takes a list or a "
        'table; write it as ["a", "b"] or {"name": 1}'
    )


def read_key_env(name: str) -> str | None:
    """The key in environment variable `name`, without the blanks that come along from files; None when unset."""
    value = os.environ.get(name, "").strip()
    return value or None


def metrics_key(config: Config) -> str | None:
    """The key that `/metrics` asks for, None when it asks for none. Raises ConfigError when its variable is not set."""
    name = config.metrics.key_env
    if name is None:
        return None
    key = read_key_env(name)
    if key is None:
        raise ConfigError(
            [f"metrics.key_env: environment variable {name} is not set; set it where the gateway starts, or remove it"]
        )
    return key
