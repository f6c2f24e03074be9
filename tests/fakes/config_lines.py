"""A small sound config to break in one place, for the tests of gateway/config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.config.load import LoadedConfig, parse
from gateway.domain.errors import ConfigError

PATH = Path("/etc/poolgate/config.toml")
HASH = "a" * 64


def sound(**sections: Any) -> dict[str, Any]:
    """The document of a sound config; `sections` replace whole sections."""
    return {
        "pools": {"a": {"model": "org/name"}, "b": {"urls": ["http://127.0.0.1:9"]}},
        "routes": {"chat": {"targets": [{"pool": "a"}]}},
        **sections,
    }


def pool(**keys: Any) -> dict[str, Any]:
    """The document of a config whose pool "a" has these keys."""
    return sound(pools={"a": keys if "model" in keys or "urls" in keys else {"model": "org/name", **keys}})


def route(**keys: Any) -> dict[str, Any]:
    """The document of a config whose route "chat" has these keys."""
    base = sound(classes={"batch": {}})
    return {**base, "routes": {"chat": {"targets": [{"pool": "a"}], **keys}}}


def loads(document: dict[str, Any]) -> LoadedConfig:
    return parse(document, PATH)


def faults(document: dict[str, Any]) -> list[str]:
    """What is wrong with it; fails the test when nothing is."""
    with pytest.raises(ConfigError) as caught:
        parse(document, PATH)
    return caught.value.findings
