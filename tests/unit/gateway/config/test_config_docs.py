"""docs/config.md against the schema: every key is there, its default is true, its example works."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

from gateway.config import schema
from gateway.config.load import parse

DOCUMENT = Path(__file__).parents[4] / "docs" / "config.md"
SECTIONS: dict[str, type[BaseModel]] = {
    "[gateway]": schema.GatewaySection,
    "[gateway.timeouts]": schema.TimeoutsSection,
    "[gateway.retry]": schema.RetrySection,
    "[redis]": schema.RedisSection,
    "[metrics]": schema.MetricsSection,
    "[classes.NAME]": schema.ClassSection,
    "[users.NAME]": schema.UserSection,
    "[keys.NAME]": schema.KeySection,
    "limits": schema.LimitsSection,
    "[workers]": schema.WorkersSection,
    "[pools.NAME]": schema.PoolSection,
    "replicas of a pool": schema.ReplicaSection,
    "[routes.NAME]": schema.RouteSection,
    "targets of a route": schema.TargetSection,
    "[routes.NAME.by_class.CLASS]": schema.OrderSection,
}
WHERE = {  # where an example of the section goes in a config
    "[gateway]": ("gateway",),
    "[gateway.timeouts]": ("gateway", "timeouts"),
    "[gateway.retry]": ("gateway", "retry"),
    "[redis]": ("redis",),
    "[metrics]": ("metrics",),
    "[classes.NAME]": ("classes", "batch"),
    "[users.NAME]": ("users", "alice"),
    "[keys.NAME]": ("keys", "k"),
    "limits": ("users", "alice", "limits"),
    "[workers]": ("workers",),
    "[pools.NAME]": ("pools", "a"),
    "replicas of a pool": ("pools", "a", "replicas", 0),
    "[routes.NAME]": ("routes", "chat"),
    "targets of a route": ("routes", "chat", "targets", 0),
    "[routes.NAME.by_class.CLASS]": ("routes", "chat", "by_class", "batch"),
}
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| (`[^`]+`|—|required) \| (.+) \| `(.+)` \|$", re.MULTILINE)


def rows() -> list[tuple[str, str, str, str]]:
    """(section, key, default, example) of each row of the document's tables."""
    found = []
    for part in DOCUMENT.read_text().split("\n## ")[1:]:
        title = part.partition("\n")[0]
        found += [(title, row[1], row[3].strip("`"), row[5]) for row in ROW.finditer(part)]
    return found


def toml(text: str) -> Any:
    return tomllib.loads(f"it = {text}")["it"]


def plain(value: Any) -> Any:
    """A schema default as TOML would write it: only what was set."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_every_key_of_the_schema_is_documented_and_no_other():
    written = [(title, key) for title, key, _, _ in rows()]
    in_schema = [
        (title, field.alias or name)
        for title, section in SECTIONS.items()
        for name, field in section.model_fields.items()
    ]
    assert sorted(written) == sorted(in_schema)


def test_every_section_of_the_schema_is_one_of_the_documents():
    assert set(schema.Config.model_fields) == {str(where[0]) for where in WHERE.values()}
    sections = {c for c in vars(schema).values() if isinstance(c, type) and issubclass(c, schema.Section)}
    assert sections - {schema.Section} == set(SECTIONS.values())


@pytest.mark.parametrize(("title", "key", "default", "example"), rows(), ids=lambda text: text[:24])
def test_the_documented_default_is_the_schemas(title, key, default, example):
    fields = SECTIONS[title].model_fields
    field = next(f for name, f in fields.items() if (f.alias or name) == key)
    if default == "required":
        assert field.is_required()
    elif default == "—":
        assert field.default is None
    else:
        assert plain(field.default) == toml(default)


@pytest.mark.parametrize(("title", "key", "default", "example"), rows(), ids=lambda text: text[:24])
def test_the_documented_example_is_a_sound_value_and_not_the_default(title, key, default, example):
    pool: dict[str, Any] = {"model": "org/name"}
    if title == "[pools.NAME]" and key in ("model", "urls"):
        pool = {}
    elif title == "[pools.NAME]" and key in schema.ELSEWHERE_KEYS:
        pool = {"urls": ["https://llm.example.com"]}
    data: dict[str, Any] = {
        "gateway": {"timeouts": {}, "retry": {}},
        "redis": {},
        "metrics": {},
        "classes": {"batch": {}},
        "users": {"alice": {"limits": {}}},
        "keys": {"k": {} if title == "[keys.NAME]" and key in ("key_env", "sha256") else {"key_env": "K"}},
        "workers": {},
        "pools": {"a": pool, "b": {"model": "org/other"}},
        "routes": {"chat": {"targets": [{"pool": "a"}]}},
    }
    if title == "replicas of a pool":
        data["pools"]["a"]["replicas"] = [{}]
    if key == "tensor_parallel_size":
        data["pools"]["a"]["replicas"] = [{"gpus": [0, 1]}]
    if title == "[routes.NAME.by_class.CLASS]":
        data["routes"]["chat"]["by_class"] = {"batch": {"targets": [{"pool": "b"}]}}
    place: Any = data
    for step in WHERE[title]:
        place = place[step]
    place[key] = toml(example.replace("\\|", "|"))
    parse(data, Path("/etc/poolgate/config.toml"))
    assert default in ("—", "required") or toml(default) != place[key]
